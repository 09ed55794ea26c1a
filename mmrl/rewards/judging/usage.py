"""Count the requests and tokens of judges behind endpoints, and apply their budget. Imports no torch.

    judge-usage.jsonl   {"step", "judge", "calls", "prompt_tokens", "completion_tokens", "unreported"}

A row for each batch of questions, ``step`` -1 outside a step; tokens are those the endpoint reports, ``unreported``
counts its answers without. The file is never cut back: what was used stays used when a resumed run repeats a step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from mmrl.config.evaluation_checks import label_of
from mmrl.config.schema import Reward
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject, elements
from mmrl.core.lines import lines_of, rows_of
from mmrl.core.reward_contract import Context

USAGE = "judge-usage.jsonl"
COUNTS = ("calls", "prompt_tokens", "completion_tokens", "unreported")
_MICROSECONDS = "microseconds"
PREFIX = "judge/"
"""Of the keys in ``Context.sent`` and in the metrics: ``judge/<label>/calls``."""


def used(usage: Json) -> dict[str, int]:
    """The counts of one answer, from the field ``usage`` of a chat completion."""
    given = usage if isinstance(usage, Mapping) else {}
    prompt, completion, both = (_count(given.get(f"{name}_tokens")) for name in ("prompt", "completion", "total"))
    if prompt is completion is both is None:
        return {"unreported": 1}
    if prompt is None:
        prompt = max(0, (both or 0) - (completion or 0))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": max(0, (both or 0) - prompt) if completion is None else completion,
    }


@contextmanager
def request(sent: Counter[str], media: int, questions: int) -> Generator[None]:
    """Count a request, its bytes, and the time until its end, which may be an error."""
    sent.update(media=media, questions=questions, calls=1)
    began = time.perf_counter()
    try:
        yield
    finally:
        sent[_MICROSECONDS] += round(1e6 * (time.perf_counter() - began))


def note(sent: Counter[str], context: Context, at_once: int) -> None:
    """Add what a batch of questions took to the context, and a row to the file: bytes under their own names, the
    rest under the judge's. ``at_once``: requests that the judge makes at the same time."""
    asked = context.asked
    asked.requests, asked.seconds, asked.at_once = sent["calls"], sent.pop(_MICROSECONDS, 0) / 1e6, at_once
    row = {name: sent[name] for name in COUNTS if sent[name]}
    context.sent.update({name: n for name, n in sent.items() if name not in COUNTS})
    context.sent.update({f"{PREFIX}{context.label}/{name}": n for name, n in row.items()})
    if context.folder is not None and row:
        lines_of(context.folder / USAGE).append({"step": context.step, "judge": context.label, **row})


def usage_in(folder: Path) -> Counter[str]:
    """The sums of the file in ``folder``, by ``judge/<label>/<count>``."""
    total: Counter[str] = Counter()
    for row in rows_of(folder / USAGE):
        total.update({f"{PREFIX}{row.get('judge')}/{name}": _count(row.get(name)) or 0 for name in COUNTS})
    return +total


def parse_budget(given: Json) -> dict[str, int]:
    """``{calls: n, tokens: n}``, either or both. Raises ``UserError``."""
    if not isinstance(given, Mapping) or not given or set(given) - {"calls", "tokens"}:
        raise UserError(f"options.budget: {given!r}; write {{calls: 10000}}, {{tokens: 5000000}} or both")
    budget: dict[str, int] = {}
    for name, value in given.items():
        budget[name] = _count(value) or 0
        if not budget[name]:
            raise UserError(f"options.budget.{name}: {value!r}; write a whole number, 1 or more")
    return budget


class Spending:
    """The requests and tokens of a run's judges, over all controllers and starts, and the budgets that end the run.

    ``rewards``: those of the recipe by the key where they stand. All controllers have the same figures after a step.
    """

    def __init__(self, rewards: Mapping[str, Sequence[Reward]]) -> None:
        self._budgets = [
            (f"{key}[{i}]", label_of(reward.name, reward.label), reward.options["budget"])
            for key, of in rewards.items()
            for i, reward in enumerate(of)
            if "budget" in reward.options
        ]
        self.total: Counter[str] = Counter()
        self._known: Counter[str] = Counter()

    def begin(self, folders: Iterable[Path], gather: Callable[[dict[str, int]], Sequence[Mapping[str, int]]]) -> None:
        """Read what earlier starts of the run used from the files in this controller's ``folders``."""
        mine = sum((usage_in(folder) for folder in folders), Counter())
        self.total = sum((Counter(of) for of in gather(dict(mine))), Counter())

    def fresh(self, sent: Iterable[Counter[str]]) -> dict[str, int]:
        """What this controller used since the last call; ``sent``: the counts of its rewards from the start."""
        now = Counter({key: n for key, n in sum(sent, Counter()).items() if key.startswith(PREFIX)})
        found = {key: n - self._known[key] for key, n in now.items()}
        self._known = now
        return found

    def add(self, rows: Sequence[Mapping[str, float]]) -> dict[str, int]:
        """Add what all controllers used, from their metric rows. Returns the sums by key."""
        sums: Counter[str] = Counter()
        for row in rows:
            sums.update({key: int(n) for key, n in row.items() if key.startswith(PREFIX)})
        self.total.update(sums)
        return dict(sums)

    def over(self) -> str | None:
        """Why the run must stop now: which judge has used up its budget, and what to do."""
        for key, label, given in self._budgets:
            of = {name: self.total[f"{PREFIX}{label}/{name}"] for name in COUNTS}
            if not of["calls"]:
                continue
            limits = parse_budget(given)
            if "tokens" in limits and of["unreported"]:
                return (
                    f"{key}.options.budget.tokens: the endpoint of the judge {label!r} does not report its tokens "
                    "(usage), so that no budget of tokens can be kept; set options.budget.calls in its place"
                )
            spent = {"calls": of["calls"], "tokens": of["prompt_tokens"] + of["completion_tokens"]}
            for name, limit in limits.items():
                if spent[name] >= limit:
                    return (
                        f"the judge {label!r} has used up its budget: {spent[name]:,} of {limit:,} {name}; to go on, "
                        f"raise {key}.options.budget.{name}"
                    )
        return None


def without_limits(recipe: JsonObject) -> dict[str, Json]:
    """A resolved recipe without how long calls of its rewards may take, how often they are repeated, and the budgets of
    its judges, which a run that is resumed may change."""
    kept = [_without_limits(one) for one in elements(recipe.get("rewards")) if isinstance(one, Mapping)]
    return {**recipe, "rewards": kept}


def _without_limits(reward: JsonObject) -> JsonObject:
    options = reward.get("options")
    kept = {k: v for k, v in options.items() if k != "budget"} if isinstance(options, Mapping) else {}
    return {k: v for k, v in reward.items() if k not in ("timeout", "retries")} | {"options": kept}


def _count(value: Json) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
