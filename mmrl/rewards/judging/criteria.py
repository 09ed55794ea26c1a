"""Several criteria in one answer of a judge, the essential ones first (after RLR3, Yu et al. 2026, arXiv 2605.30244).

    answer:
      type: criteria
      criteria:
        total: {extract: the number that it ends with, verify: "answer:number", essential: true, weight: 2}
        steps: {judge: It shows each step of the sum.}

A criterion is either *judged*, a statement that the judge says true or false of, or *extracted*: the judge copies a
piece of the response, and a verifier, a reward of text that computes, compares it. The truth stays with the verifier:
the judge is never shown it, so that it cannot agree with what it should find. With the values ``v`` in [0, 1] and
weights ``w`` of essential and other criteria,

    score = (sum_essential w v + gate sum_others w v) / sum w,   gate = 1 where every essential v is 1, else 0

What is extracted must stand in the response, white space and case aside: a judge that writes an answer of its own gives
no verdict. An answer without one of the criteria gives none either, and its reason names the criterion.

Departs: criteria are those of the recipe, and of a prompt the truth alone; the paper has rubrics for each prompt. One
call answers for both kinds; the paper asks an extractor and a judge, and hides pictures from both, which is here the
rubric's choice. Its own formula of the aggregation was not at hand, and it spreads scores in groups that saturate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from mmrl.core.errors import UserError
from mmrl.core.grouping import grouped
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.reward_contract import Context, Failed, Parts, Value
from mmrl.core.trajectory import Sample
from mmrl.rewards.judging.json_answer import UnreadableError, json_in
from mmrl.rewards.loading import Loaded, build, find, problems, refused
from mmrl.rewards.returned import BatchError, read_answer

if TYPE_CHECKING:
    from mmrl.rewards.judging.asking import Outcome
    from mmrl.rewards.judging.modes import Job, Mode

WHERE = "options.answer.criteria"
MOST = 32
LONGEST = 2000
"""Characters of what is extracted."""
_NAME = re.compile(r"[A-Za-z_]\w{0,39}")
_TAKEN = ("score", "spans", "feedback", "right", "wrong")
_KEYS = ("judge", "extract", "verify", "options", "essential", "weight")


@dataclass(frozen=True)
class Criterion:
    """``judge``: a statement; or ``extract``: what to copy, and ``verify`` with ``options``: what compares it."""

    name: str
    judge: str | None = None
    extract: str | None = None
    verify: str = "answer:exact"
    options: JsonObject = field(default_factory=dict)
    essential: bool = False
    weight: float = 1.0

    @property
    def asked(self) -> str:
        """What the judge reads of it."""
        if self.judge is not None:
            return f"{self.name}: true or false: {self.judge}"
        return f'{self.name}: copy from it, word for word: {self.extract}; "" where it is not there'


@dataclass(frozen=True)
class Criteria:
    """The answer: an object with a field for each criterion."""

    criteria: tuple[Criterion, ...]

    @property
    def asked(self) -> str:
        """The ``{{ criteria }}`` of a rubric."""
        lines = "\n".join(f"- {one.asked}" for one in self.criteria)
        return f"{lines}\nAnswer with one JSON object that has exactly these fields."

    @property
    def schema(self) -> JsonObject:
        """The JSON Schema of the answer."""
        text: JsonObject = {"type": "string", "maxLength": LONGEST}
        fields: JsonObject = {one.name: text if one.judge is None else {"type": "boolean"} for one in self.criteria}
        return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}

    def read(self, text: str) -> dict[str, float | str]:
        """The value of each criterion: 0 or 1, or what was extracted. Raises ``UnreadableError``."""
        found, out = json_in(text), dict[str, float | str]()
        for one in self.criteria:
            value = found.get(one.name)
            if one.name not in found:
                raise UnreadableError(f"misses the criterion {one.name!r}")
            if one.judge is not None and isinstance(value, bool):
                out[one.name] = float(value)
            elif one.judge is None and isinstance(value, str) and len(value) <= LONGEST:
                out[one.name] = value.strip()
            else:
                wanted = "true or false" if one.judge is not None else f"a text of at most {LONGEST} characters"
                raise UnreadableError(f"says {str(value)[:60]!r} of the criterion {one.name!r}, which is {wanted}")
        return out

    def total(self, values: Mapping[str, float]) -> float:
        """The score of values in [0, 1]."""
        whole = sum(one.weight for one in self.criteria)
        gate = all(values[one.name] == 1 for one in self.criteria if one.essential)
        return sum(one.weight * values[one.name] for one in self.criteria if one.essential or gate) / whole

    def unmet(self, values: Mapping[str, float]) -> str:
        """What does not hold, as feedback."""
        failed = [one for one in self.criteria if values[one.name] < 1]
        return "\n".join(f"Not right: {one.judge or one.extract}" for one in failed)


def parse_criteria(given: Json) -> Criteria:
    """The criteria of a recipe. Raises ``UserError``."""
    if not isinstance(given, Mapping) or not 0 < len(given) <= MOST:
        raise UserError(f"{WHERE}: write 1 to {MOST} of them, each name: {{judge: a statement}} or {{extract: ...}}")
    found = tuple(_criterion(str(name), spec) for name, spec in given.items())
    if sum(one.weight for one in found) <= 0:
        raise UserError(f"{WHERE}: all weights are 0; give one of them a weight above 0")
    return Criteria(found)


def _criterion(name: str, spec: Json) -> Criterion:
    where = f"{WHERE}.{name[:40]}"
    if not _NAME.fullmatch(name) or name in _TAKEN:
        raise UserError(f"{where}: a name is a word of letters and digits, and none of {', '.join(_TAKEN)}; rename it")
    if not isinstance(spec, Mapping):
        raise UserError(f"{where}: {str(spec)[:60]!r}; write {{judge: a statement}} or {{extract: what to copy}}")
    if unknown := sorted(map(str, spec.keys() - {*_KEYS})):
        raise UserError(f"{where}.{unknown[0]}: there is no such key; there are {', '.join(_KEYS)}")
    if "judge" in spec and spec.keys() & {"extract", "verify", "options"}:
        raise UserError(f"{where}: it is judged or extracted, not both; remove judge, or extract, verify and options")
    if "judge" not in spec and "extract" not in spec:
        what = f"{spec['verify']} compares, and nothing is" if "verify" in spec else "nothing is judged or"
        raise UserError(f"{where}: {what} extracted for it; add extract: what to copy from the response, or judge")
    texts = {key: spec[key] for key in ("judge", "extract", "verify") if key in spec}
    for key, value in texts.items():
        if not isinstance(value, str) or not value.strip() or "\n" in value:
            raise UserError(f"{where}.{key}: {str(value)[:60]!r}; write a line of text")
    options, weight, essential = spec.get("options", {}), spec.get("weight", 1.0), spec.get("essential", False)
    if not isinstance(options, Mapping):
        raise UserError(f"{where}.options: {str(options)[:60]!r}; write the options of the verifier")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1e9:
        raise UserError(f"{where}.weight: {weight!r}; write a number, 0 or more")
    if not isinstance(essential, bool):
        raise UserError(f"{where}.essential: {essential!r}; write true or false")
    made = Criterion(name, essential=essential, weight=float(weight), options=options)
    return replace(made, **cast("dict[str, str]", texts))


class Verifiers:
    """What compares extracted texts with the truths of prompts. ``shown``: the fields of a prompt's meta that the judge
    reads. Raises ``UserError`` for a verifier that does not compute, and for a truth that the judge would read."""

    def __init__(self, criteria: Criteria, shown: Sequence[str]) -> None:
        self._criteria = criteria
        self._by_name: dict[str, Loaded] = {}
        for one in criteria.criteria:
            if one.extract is None:
                continue
            where, found = f"{WHERE}.{one.name}", find(one.verify)
            declared = found.declaration
            wrong = problems(found, one.options) or refused(found, one.options)
            if not wrong and (declared.device or declared.per == "group" or found.reads(one.options) != ("text",)):
                wrong = ["is no verifier of single texts that computes without a model; take one, such as answer:exact"]
            if wrong:
                raise UserError(f"{where}.verify: {one.verify}: {wrong[0]}")
            key = one.options.get("key", "answer")
            if key in shown:
                raise UserError(
                    f"options.meta: the judge would read meta.{key}, the truth of what it extracts for {where}; remove "
                    "it there"
                )
            self._by_name[one.name] = build(found, dict(one.options))
            if self._by_name[one.name].is_async:
                raise UserError(f"{where}.verify: {one.verify} is asynchronous; take one that computes at once")

    def values(self, sample: Sample, verdict: Mapping[str, float | str], said: str | None) -> dict[str, float] | Failed:
        """The value of each criterion; ``said``: the response as the judge read it, None of a picture."""
        out = dict[str, float]()
        for one in self._criteria.criteria:
            value = verdict.get(one.name)
            if value is None or isinstance(value, str) != (one.judge is None):
                return Failed(f"a recorded verdict misses the criterion {one.name!r}")
            if not isinstance(value, str):
                out[one.name] = value
                continue
            if not value:
                out[one.name] = 0.0
                continue
            if said is not None and _squeezed(value) not in _squeezed(said):
                return Failed(f"the judge extracts {value[:60]!r} for {one.name!r}, which the response does not say")
            found = self._verified(one, replace(sample, text=value, truncated=False, begun="", episode=None))
            if isinstance(found, Failed):
                return found
            out[one.name] = found
        return out

    def _verified(self, one: Criterion, sample: Sample) -> float | Failed:
        loaded = self._by_name[one.name]
        try:
            answer = read_answer(loaded.call([sample], context=Context(label=one.name)), 1, loaded.place)
        except BatchError as error:
            return Failed(f"the verifier of {one.name!r}: {error.reason}")
        if answer.reasons[0] is not None:
            return Failed(f"the verifier of {one.name!r}: {answer.reasons[0]}")
        value = answer.total[0]
        if not 0 <= value <= 1:
            return Failed(f"the verifier of {one.name!r} says {value:g}, which is not from 0 to 1")
        return value

    def fold(
        self,
        samples: Sequence[Sample],
        said: Sequence[str | None],
        jobs: Sequence[Job],
        outcomes: Sequence[Outcome],
        mode: Mode,
    ) -> tuple[Parts, list[str | None]]:
        """``score`` and each criterion by its name; and what does not hold of each sample. ``said``: see ``values``."""
        of = grouped((job.rows, outcome) for job, outcome in zip(jobs, outcomes, strict=True))
        rows = [self._decided(one, said[row], of.get((row,), []), mode) for row, one in enumerate(samples)]
        names = ("score", *(one.name for one in self._criteria.criteria))
        return {name: [parts.get(name) for parts, _ in rows] for name in names}, [told for _, told in rows]

    def _decided(
        self, sample: Sample, said: str | None, outcomes: Sequence[Outcome], mode: Mode
    ) -> tuple[dict[str, Value], str | None]:
        """The parts of one sample, and what does not hold of it."""
        found, missed = list[dict[str, float]](), list[str]()
        for outcome in outcomes:
            verdict, none = outcome.verdict, Failed(outcome.reason or "no verdict")
            values = self.values(sample, verdict, said) if isinstance(verdict, dict) else none
            if isinstance(values, Failed):
                missed.append(values.reason)
            else:
                found.append(values)
        score = mode.decided([self._criteria.total(values) for values in found], missed)
        if not isinstance(score, float):
            return {"score": score}, None
        means = {one.name: sum(v[one.name] for v in found) / len(found) for one in self._criteria.criteria}
        return {"score": score, **means}, self._criteria.unmet(means) or None

    def close(self) -> None:
        """Let the verifiers close what they hold."""
        for loaded in self._by_name.values():
            loaded.close()


def _squeezed(text: str) -> str:
    return "".join(text.casefold().split())
