"""A generative judge: a model reads a rubric and writes a verdict (docs/judges.md). Scores are in [0, 1].

- name: judge
  options:
    model: Qwen/Qwen2.5-VL-7B-Instruct      # or {url: https://host/v1, name: ...}, or {vllm: path}
    rubric: "{{ image }}Does the picture show {{ prompt }}? Answer yes or no."
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.grouping import grouped
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.lines import lines_of
from mmrl.core.reward_contract import Asks, Context, Declaration, Input, Parts, Weights
from mmrl.core.trajectory import Sample, SampleId
from mmrl.rewards.judging.answers import READING, ByCriterion, Kind, Words, parse_kind
from mmrl.rewards.judging.asking import Ask, Outcome, Settings, seed_of_samples, seeded
from mmrl.rewards.judging.criteria import Verifiers
from mmrl.rewards.judging.modes import Job, Mode
from mmrl.rewards.judging.protocol import kind_of
from mmrl.rewards.judging.replay import recorded_here
from mmrl.rewards.judging.rubric import Rubric
from mmrl.rewards.judging.store import TRANSCRIPTS, Cache, thumbnail
from mmrl.rewards.judging.usage import note, parse_budget

if TYPE_CHECKING:
    import torch

    from mmrl.rewards.judging.protocol import LocalJudge, RemoteJudge
    from mmrl.rewards.judging.server import ServedJudge

_LOCAL = ("path", "batch", "dtype", "template", "chat_template", "quantize")
_URL = ("url", "name", "token", "extra", "insecure")
_VLLM = ("vllm", "args", "python", "extra", "start_s")


@dataclass
class _Hearing:
    """The questions of one call with their keys in the cache, the outcomes that exist, and the questions to ask."""

    jobs: list[Job]
    keys: list[str | None]
    known: dict[str, Outcome]
    open: dict[str, Ask]


def _models(options: Mapping[str, Any]) -> list[Weights]:
    """The model on the device, none where an endpoint is asked. Raises ``UserError``."""
    model: Any = options.get("model")
    if not _is_local(model):
        return [_served(model)] if "vllm" in model else []
    given = {"path": model} if isinstance(model, str) else dict(model or {})
    dtype, bits = str(given.get("dtype", "auto")), kind_of(given.get("quantize")) or ""
    return [Weights(str(given["path"]), dtype, asks=_asks(options, given), quantize=bits)]


def _asks(options: Mapping[str, Any], model: Mapping[str, Any]) -> Asks:
    mode = Mode.of(str(options.get("mode", "pointwise")), 1, None, None, 0).name
    kind = parse_kind(mode, options.get("answer"))
    rubric = Rubric(str(options["rubric"]), mode, options.get("meta", ()), criteria=_criteria(kind))
    one = isinstance(kind, Words)
    template = dict(model.get("template") or {})
    if "chat_template" in model:
        template["chat_template"] = model["chat_template"]
    tokens = 1 if one else int(options.get("max_tokens", 256))
    return Asks(lambda sample: rubric.render([sample]), tokens, int(model.get("batch", 16)), template)


def _reads(options: Mapping[str, Any]) -> tuple[Input, ...]:
    """What the rubric shows. Raises ``UserError``."""
    mode = Mode.of(str(options.get("mode", "pointwise")), 1, None, None, 0).name
    criteria = _criteria(parse_kind(mode, options.get("answer")))
    return Rubric(str(options["rubric"]), mode, options.get("meta", ()), criteria=criteria).inputs


def _criteria(kind: Kind) -> str:
    """What a rubric shows of the criteria of an answer; empty where it has none."""
    return kind.criteria.asked if isinstance(kind, ByCriterion) else ""


@mmrl.reward(paths=("model", "model.path", "model.vllm", "rubric", "cache"), models=_models, reads=_reads, checks=True)
class Judge:
    """Scores by a model's verdict.

    ``model``: a path or hub name (transformers, in process), ``{path, batch, dtype, template,
    chat_template}``, ``{url, name, token, extra, insecure}``, or ``{vllm: path, args, python, extra}`` (a server of
    our own). ``rubric``: a template or its file. ``answer``: ``{type: yes_no}``, ``{type: number, min, max}``,
    ``{type: json, schema, score}`` or ``{type: criteria, criteria}`` (``mmrl.rewards.judging.criteria``). ``mode``:
    pointwise, pairwise, ranking or steps. ``votes`` critiques become one by ``vote``. ``order``: of the candidates
    where they are compared: average, fixed or random
    (``mmrl.rewards.judging.modes``).
    ``meta``: the fields of a prompt's meta that the judge may know. ``timeout``, ``retries``, ``concurrency``: of
    requests to an endpoint. ``cache``: whether verdicts are kept in the run's folder, or a folder that several runs
    share. ``budget``: ``{calls, tokens}`` of an endpoint, after which training stops (``mmrl.rewards.judging.usage``).
    Raises ``UserError`` for what cannot work, an endpoint that is down included.
    """

    def __init__(
        self,
        model: str | JsonObject,
        rubric: str,
        *,
        mode: str = "pointwise",
        answer: JsonObject | None = None,
        system: str | None = None,
        meta: Sequence[str] = (),
        votes: int = 1,
        vote: str | None = None,
        temperature: float = 0.0,
        max_tokens: int = 256,
        reasks: int = 2,
        opponents: int | None = None,
        order: str | None = None,
        frames: int = 8,
        timeout: float = 60.0,
        retries: int = 3,
        concurrency: int = 16,
        cache: bool | str = True,
        seed: int = 0,
        budget: Mapping[str, int] | None = None,
    ) -> None:
        self.mode, self.kind = Mode.of(mode, votes, vote, opponents, seed, order), parse_kind(mode, answer)
        self.rubric = Rubric(rubric, mode, meta, frames, seed, _criteria(self.kind))
        self.verifiers = Verifiers(self.kind.criteria, meta) if isinstance(self.kind, ByCriterion) else None
        self.settings, self._caches = Settings(temperature, max_tokens, reasks), dict[Path | None, Cache]()
        _check_least({"temperature": temperature, "reasks": reasks, "retries": retries}, 0)
        _check_least({"max_tokens": max_tokens, "frames": frames, "concurrency": concurrency}, 1)
        _check_least({"timeout": timeout}, 0.001)
        if isinstance(cache, str) and not Path(cache).is_dir():
            raise UserError(f"options.cache: {cache} is no folder; make it, or write true for the run's own cache")
        self.system, self.cache, self.seed, self.concurrency = system, bool(cache), seed, concurrency
        self.store = Path(cache) if isinstance(cache, str) else None
        self._check_votes()
        _check_budget(budget, model)
        self.__mmrl_reward__ = Declaration(
            inputs=self.rubric.inputs,
            per="group" if self.mode.grouped else "sample",
            spans="episode" if mode == "steps" else False,
            own_deadline=not _is_local(model),
            device=_is_local(model) or "vllm" in model,
            paths=("model", "model.path", "model.vllm", "rubric", "cache"),
            reads=_reads,
        )
        self._recorded = recorded_here()
        self.local: LocalJudge | None = None
        self.remote: RemoteJudge | None = None
        self.served: ServedJudge | None = None
        if isinstance(model, str) or _is_local(model):
            backend = self.local = self.open_local(model)
        else:
            backend = self.remote = self._connect(model, timeout, retries, concurrency)
            self.score = self._score_by_endpoint  # type: ignore[method-assign]
        self.rubric.control = backend.control
        self.identity = [backend.identity, repr(self.kind), self.mode.name, temperature, max_tokens, reasks, READING]
        if {"image", "video"} & {*self.rubric.inputs} and not backend.sees:
            self.close()
            raise UserError(f"options.model: {model} reads text only, and the rubric shows pictures; use one for both")

    def open_local(self, model: str | JsonObject) -> LocalJudge:
        """The model in this process that answers; a subclass may bring one of its own."""
        return _local(model)

    def score(self, samples: Sequence[Sample], *, context: Context) -> Parts:
        """``score`` for each sample; in mode steps also ``right``, ``wrong`` and ``spans``."""
        assert self.local is not None
        hearing = self._open(samples, context)
        outcomes = self.local.ask(list(hearing.open.values()), self.kind, self.settings, context.device)
        return self._close(samples, hearing, outcomes, context)

    async def _score_by_endpoint(self, samples: Sequence[Sample], *, context: Context) -> Parts:
        assert self.remote is not None
        hearing = self._open(samples, context)
        sent: Counter[str] = Counter()
        try:
            keys = list(hearing.open)

            def keep(number: int, outcome: Outcome) -> None:
                """At once: what is answered before the process dies is not asked again."""
                if self.cache:
                    self._cache(context.folder).put({keys[number]: outcome})

            settings = replace(self.settings, patience=context.patience)
            outcomes = await self.remote.ask(list(hearing.open.values()), self.kind, settings, sent, keep)
        finally:
            note(sent, context, self.concurrency)
        return self._close(samples, hearing, outcomes, context)

    def sleep(self, device: torch.device | str) -> None:
        """Free the memory of ``device`` that a model or a server of this judge uses, until the next call."""
        if self.local is not None:
            self.local.sleep(device)
        if self.served is not None:
            self.served.sleep()

    def wake(self, device: torch.device | str) -> bool:
        """Load the model, or start the server. Returns whether later calls are faster. Raises ``UserError``."""
        if self.local is not None:
            return bool(self.local.wake(device))
        if self.served is not None and self._recorded is not None:
            return False  # it starts where it is asked after all
        return self.served is not None and self.served.wake()

    def close(self) -> None:
        """End the server, where this judge started one."""
        if self.verifiers is not None:
            self.verifiers.close()
        if self.served is not None:
            self.served.close()

    def _open(self, samples: Sequence[Sample], context: Context) -> _Hearing:
        jobs = [self._seeded(job, samples) for job in self.mode.jobs(samples, self.rubric, self.system)]
        keys = [None if job.ask is None else job.ask.digest(self.identity, job.ask.seed) for job in jobs]
        known, open_ = {}, {}
        cache = self._cache(context.folder) if self.cache else None
        times: Counter[tuple[int, ...]] = Counter()
        for job, key in zip(jobs, keys, strict=True):
            nth = times[job.rows]
            times[job.rows] += 1
            if key is not None and job.ask is not None:
                found = self._found(job.ask, [samples[row].id for row in job.rows], nth, context)
                found = cache.get(key) if found is None and cache is not None else found
                if found is not None:
                    known[key] = found
                else:
                    open_[key] = job.ask
        return _Hearing(jobs, keys, known, open_)

    def _found(self, ask: Ask, samples: Sequence[SampleId], nth: int, context: Context) -> Outcome | None:
        """The outcome of this question in the records of a run that is replayed."""
        if self._recorded is None:
            return None
        outside = self.remote is not None
        return self._recorded.outcome(context.step, context.label, samples, ask.text, nth, outside=outside)

    def _seeded(self, job: Job, samples: Sequence[Sample]) -> Job:
        """The job with a seed: from the question's content, so that an equal question has an equal answer; without a
        cache, from the sample's id."""
        if job.ask is None:
            return job
        if self.cache:
            seed = seeded(self.seed, job.ask.digest(self.identity), job.vote)
        else:
            seed = seed_of_samples(self.seed, [samples[row].id for row in job.rows], job.vote)
        return replace(job, ask=replace(job.ask, seed=seed))

    def _close(
        self, samples: Sequence[Sample], hearing: _Hearing, outcomes: Sequence[Outcome], context: Context
    ) -> Parts:
        fresh = dict(zip(hearing.open, outcomes, strict=True))
        if self.cache:
            self._cache(context.folder).put(fresh)
        all_ = hearing.known | fresh
        by_job = [
            Outcome(reason=job.reason) if key is None else all_[key]
            for job, key in zip(hearing.jobs, hearing.keys, strict=True)
        ]
        told: Sequence[str | None] | None = None
        if self.verifiers is None:
            returned = self.mode.fold(samples, hearing.jobs, by_job)
        else:
            said = [None if s.text is None else self.rubric.clean_response(s.transcript) for s in samples]
            returned, told = self.verifiers.fold(samples, said, hearing.jobs, by_job, self.mode)
        shown = returned["right" if self.mode.name == "steps" else "score"]
        if context.folder is not None:
            rows = self._transcripts(samples, hearing.jobs, by_job, shown, context)
            lines_of(context.folder / TRANSCRIPTS).append(*rows)
        if not context.feedback:
            return returned
        if told is not None:
            return {**returned, "feedback": told}
        said = {job.rows: outcome.raw[-1] for job, outcome in zip(hearing.jobs, by_job, strict=True) if outcome.raw}
        return {**returned, "feedback": [said.get((row,)) for row in range(len(samples))]}

    def _transcripts(
        self,
        samples: Sequence[Sample],
        jobs: Sequence[Job],
        outcomes: Sequence[Outcome],
        scores: Sequence[object],
        context: Context,
    ) -> list[JsonObject]:
        """A row for every question, its critiques together; the lowest and the highest with their pictures."""
        merged = grouped((job.rows, i) for i, job in enumerate(jobs))
        rows: list[dict[str, Json]] = []
        firsts: list[tuple[float, int]] = []
        for shown, index in merged.items():
            mine, ask = [outcomes[i] for i in index], jobs[index[0]].ask
            values = [score if isinstance(score, float) else None for score in (scores[row] for row in shown)]
            if values[0] is not None:
                firsts.append((values[0], len(rows)))
            rows.append(
                {
                    "step": context.step,
                    "judge": context.label,
                    "samples": [[samples[i].id.slot, samples[i].id.attempt, samples[i].id.sample] for i in shown],
                    "prompt": samples[shown[0]].prompt.text,
                    "responses": [samples[i].text for i in shown],
                    "system": self.system,
                    "request": None if ask is None else ask.text,
                    "answers": [text for outcome in mine for text in outcome.raw],
                    "verdicts": [outcome.verdict for outcome in mine],
                    "scores": values,
                    "reason": next((o.reason for o in mine if o.reason is not None), None),
                    "seconds": round(sum(0.0 if o.cached else o.seconds for o in mine), 4),
                    "cached": all(o.cached for o in mine),
                }
            )
        ranked = sorted(firsts, key=lambda first: first[0])
        for _, i in {*ranked[:1], *ranked[-1:]}:
            ask = jobs[list(merged.values())[i][0]].ask
            rows[i]["pictures"] = [thumbnail(image) for image in ask.pictures] if ask else []
        return [*rows]

    def _cache(self, folder: Path | None) -> Cache:
        folder = self.store or folder
        if folder not in self._caches:
            self._caches[folder] = Cache(folder)
        return self._caches[folder]

    def _connect(self, model: JsonObject, timeout: float, retries: int, concurrency: int) -> RemoteJudge:
        from mmrl.rewards.judging.remote import Endpoint, Requests

        vllm = "url" not in model
        given = _only(model, _VLLM if vllm else _URL)
        requests = Requests(timeout, retries, concurrency, given.get("extra") or {})
        if not vllm:
            named = {name: given[name] for name in ("token", "insecure") if name in given}
            return Endpoint(given["url"], given["name"], requests, **named)
        from mmrl.rewards.judging.server import ServedJudge

        named = {name: given[name] for name in ("python", "start_s") if name in given}
        self.served = ServedJudge(given["vllm"], _args(model), requests=requests, **named)
        return self.served

    def _check_votes(self) -> None:
        if self.mode.votes == 1:
            return
        if isinstance(self.kind, Words):
            raise UserError(
                "options.votes: answer type yes_no reads log-probs, which are the same every time; set votes: 1, or "
                "options.answer of type number or json"
            )
        same = self.mode.order == "fixed" or (self.mode.name == "pairwise" and self.mode.order == "average")
        if self.settings.temperature == 0 and same:
            raise UserError("options.votes: at temperature 0 all critiques are the same; set options.temperature: 1.0")


score = Judge


def _served(model: JsonObject) -> Weights:
    from mmrl.rewards.judging.server import weights_of

    python = model.get("python")
    return weights_of(str(model["vllm"]), _args(model), None if python is None else str(python))


def _args(model: JsonObject) -> JsonObject | None:
    """The engine arguments of a server that mmrl starts. Raises ``UserError``."""
    args = model.get("args")
    if args is not None and not isinstance(args, Mapping):
        raise UserError(f"options.model.args: {str(args)[:60]!r}; write vLLM's arguments as a mapping: {{name: value}}")
    return args


def _is_local(model: Json) -> bool:
    if isinstance(model, Mapping):
        kinds = [key for key in ("path", "url", "vllm") if key in model]
        if len(kinds) != 1:
            raise UserError("options.model: write a path, {path: ...}, {url: ..., name: ...} or {vllm: ...}")
        return kinds == ["path"]
    if not isinstance(model, str) or not model:
        raise UserError(f"options.model: {model!r}; write a path, {{url: ..., name: ...}} or {{vllm: ...}}")
    return True


def _local(model: str | JsonObject) -> LocalJudge:
    from mmrl.rewards.judging.local import LocalModel

    return LocalModel(model) if isinstance(model, str) else LocalModel(**_only(model, _LOCAL))


def _check_budget(budget: Json, model: Json) -> None:
    if budget is None:
        return
    parse_budget(budget)
    if _is_local(model):
        raise UserError("options.budget: is for a judge behind an endpoint ({url: ...} or {vllm: ...}); remove the key")


def _check_least(options: JsonObject, least: float) -> None:
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            raise UserError(f"options.{name}: {value!r}; write a number, {least:g} or more")


def _only(model: JsonObject, known: tuple[str, ...]) -> dict[str, Any]:
    unknown = sorted(set(model) - set(known))
    if unknown:
        raise UserError(f"options.model.{unknown[0]}: there is no such key; there are {', '.join(known)}")
    if known is _URL and "name" not in model:
        raise UserError("options.model.name: an endpoint needs the name of its model")
    return dict(model)
