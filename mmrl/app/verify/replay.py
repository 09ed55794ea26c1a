"""Which steps of a run can be replayed, and from where; their replay, and its comparison with the records."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mmrl.app.build import build
from mmrl.checkpoint.run_state import of_run, restore
from mmrl.config.schema import Recipe
from mmrl.core.checkpoint_manifest import Entry, entries, fault_of
from mmrl.core.checkpoint_reader import Saved, whole
from mmrl.core.clock import Clock
from mmrl.core.errors import NotFiniteError, UnscoredError, UserError
from mmrl.core.grouping import grouped
from mmrl.core.json_types import JsonObject, as_number
from mmrl.data.loading import load_prompts
from mmrl.families.text.pipeline import keep_episodes
from mmrl.logging.metrics import MetricsLog, read
from mmrl.logging.progress import Progress
from mmrl.logging.rundir import RunDir
from mmrl.report.nondeterministic_metrics import MEASURED, OF_PROCESS, why_not_compared
from mmrl.report.verified import Compared, Part, compared, metrics_of
from mmrl.step.step_context import StepContext
from mmrl.training.evaluation import Evaluator, measure
from mmrl.training.guards import EVIDENCE, GOOD, PREFIX
from mmrl.training.loop import train_step

NOT_COMPARED = MEASURED["metrics"] | OF_PROCESS
"""Metrics that do not depend on what was computed, and why."""
_OF_EPISODES = {
    "mismatch/*": "rounding: which episodes are sampled side by side depends on when they are answered",
    "episode/unclosed": "a replay calls no environment",
}
_OF_ALARM = dict.fromkeys([EVIDENCE, f"{EVIDENCE}/*", GOOD], "it follows from the scores of all evaluations before")


class Replay:
    """Final class: repeats steps of the run in ``directory``, ``last`` the last of them, and writes their records into
    ``scratch``."""

    def __init__(self, recipe: Recipe, directory: RunDir, scratch: RunDir, last: int) -> None:
        self.recipe, self.directory, self.scratch = recipe, directory, scratch
        scratch.samples.mkdir()
        self.notes: list[str] = []
        self._skipped: dict[str, str] = {}
        self._new: dict[str, None] = {}
        self._heldout: Evaluator | None = None
        with Progress(1, "load", "model") as progress:
            self.run: StepContext = build(recipe)
            self.run.rewards.folder = scratch.path
            self.episodes = keep_episodes(self.run.pipeline, directory.path, last)
            progress.advance()

    def parts(self, span: Span, rows: Rows, evaluated: Rows) -> Iterator[Part]:
        """Compare every step of ``span`` with its row; of the last one also an evaluation, its samples, and the
        checkpoint, where the run has them."""
        if span.last in evaluated:
            compares = f"{PREFIX}distance" in evaluated[span.last]
            self._open_evaluation(evaluated.get(0, {}), compares=compares)
        try:
            if span.found is not None:
                restore(self.run, span.found)
        except OSError as error:
            raise UserError(
                f"{span.start} went while it was read ({error}); where the run goes on, call mmrl verify again"
            ) from error
        with Progress(len(span.steps), "verify", "steps") as progress:
            for n in span.steps:
                listed = n == span.last
                try:
                    row = self._step(n, _spent(n, span, rows, self.recipe.train.max_cpu_seconds))
                except NotFiniteError as error:
                    yield Part("numbers", f"step {n}", [Compared("the step", False, ("not finite",))])
                    self.notes.append(f"Step {n} ended there: {error}")
                    return
                yield Part("numbers", f"step {n}", self._compared(rows[n], row), listed)
                progress.advance()
        if span.last in evaluated:
            yield from self._evaluation(span.last, evaluated[span.last])
        if tensors := self._checkpoint(span.last):
            yield tensors
        self.notes += self._about()

    def close(self) -> None:
        for rewards in [self.run.rewards] if self._heldout is None else self._heldout.rewards:
            rewards.close()
        self.run.close()

    def _step(self, n: int, spent: float) -> JsonObject:
        """Repeat step ``n``; returns its row of metrics.jsonl."""
        try:
            row, _ = train_step(self.run, n - 1, Clock(self.run.compute.device), spent)
        except UnscoredError as error:
            raise UserError(f"the replay needs rewards that do not answer now: {error}") from error
        with MetricsLog(self.scratch.metrics) as log:
            log.write(n, row)
        return read(self.scratch.metrics)[-1]

    def _compared(self, recorded: JsonObject, replayed: JsonObject) -> list[Compared]:
        left_out = NOT_COMPARED | _OF_ALARM | (_OF_EPISODES if self.recipe.environment is not None else {})
        why = {name: why_not_compared(name, left_out) for name in metrics_of(recorded)}
        self._skipped |= {name: reason for name, reason in why.items() if reason is not None}
        new = [n for n in metrics_of(replayed) if n not in recorded and why_not_compared(n, left_out) is None]
        self._new |= dict.fromkeys(new)
        return compared(recorded, replayed, [name for name, reason in why.items() if reason is None])

    def _open_evaluation(self, base: JsonObject, *, compares: bool) -> None:
        """Load what evaluates, before a checkpoint is loaded. ``base``: the row of the evaluation before training;
        ``compares``: with the base model's samples, too."""
        self._heldout = Evaluator(self.run, load_prompts(self.recipe, "heldout"))
        for rewards in self._heldout.rewards:
            rewards.folder = self.scratch.path
        self._heldout.alarm = None  # it reads all evaluations of the run, and is not compared
        self._heldout.guards.base = {name: float(v) for name, v in base.items() if isinstance(v, int | float)}
        if compares:
            self._heldout.draw_base()

    def _evaluation(self, step: int, recorded: JsonObject) -> Iterator[Part]:
        assert self._heldout is not None
        with MetricsLog(self.scratch.heldout) as log:
            measure(self.run, self._heldout, self.recipe.eval.samples, self.scratch, step, log)
        row = read(self.scratch.heldout)[-1]
        yield Part("held-out numbers", f"evaluation after step {step}", self._compared(recorded, row), True)
        if files := sorted(self._files(self.directory.samples, step)):
            found = [Compared(name, _same_file(self.directory, self.scratch, name)) for name in files]
            yield Part("files of samples", f"samples after step {step}", found)

    def _files(self, folder: Path, step: int) -> Iterator[str]:
        name = f"step_{step:06d}"
        for file in [*folder.glob(f"{name}.*"), *(folder / name).rglob("*")]:
            if file.is_file():
                yield file.relative_to(folder).as_posix()

    def _checkpoint(self, step: int) -> Part | None:
        """Compare the trained tensors with those that the run saved after this step."""
        entry = next((e for e in entries(self.directory.checkpoints) if e.step == step), None)
        if entry is None:
            return None
        of = f"checkpoint of step {step}"
        if why := fault(entry):
            if not entry.directory.is_dir():
                self.notes.append(f"The checkpoint of step {step} was removed meanwhile, and is not compared.")
                return None
            self.notes.append(f"Checkpoint {entry.directory.name} is not whole: {why}.")
            return Part("tensors", of, [Compared(entry.directory.name, False, ("not whole",))])
        try:
            saved = whole(entry).tensors
        except UserError as error:
            self.notes.append(f"The checkpoint of step {step} is not compared: {error}.")
            return Part("tensors", of, [Compared(entry.directory.name, False, ("not whole",))])
        theirs = {f"{part}/{name}": t for part, tensors in saved.items() for name, t in tensors.items()}
        ours = of_run(self.run, step).flat
        found = [_tensor(name, theirs.get(name), ours.get(name)) for name in {**theirs, **ours}]
        return Part("tensors", of, found)

    def _about(self) -> list[str]:
        """The metrics that were not compared, and why."""
        reasons = grouped((why, name) for name, why in self._skipped.items())
        if self._new:
            reasons["not in the run's records"] = list(self._new)
        return [f"Not compared ({why}): {', '.join(names)}." for why, names in reasons.items()]


def _spent(n: int, span: Span, rows: Rows, limit: float | None) -> float:
    """The recorded share of train.max_cpu_seconds that the run had used before step ``n``."""
    if limit is None or n == 1:
        return 0.0
    if span.found is not None and span.found.step == n - 1:
        return span.found.cpu_seconds / limit
    return as_number(rows[n - 1]["perf/cpu_seconds"]) / limit


def _same_file(one: RunDir, other: RunDir, name: str) -> bool:
    paths = one.samples / name, other.samples / name
    return paths[1].is_file() and paths[0].read_bytes() == paths[1].read_bytes()


def _tensor(name: str, recorded: Tensor | None, replayed: Tensor | None) -> Compared:
    if recorded is None or replayed is None:
        return Compared(name, False, ("only the replay has it" if recorded is None else "the replay has none",))
    replayed = replayed.detach().cpu()
    if (recorded.shape, recorded.dtype) != (replayed.shape, replayed.dtype):
        return Compared(name, False, ("another shape or type",))
    one, other = (t.contiguous().flatten().view(torch.uint8) for t in (recorded, replayed))
    if torch.equal(one, other):
        return Compared(name, True)
    apart = (recorded.double() - replayed.double()).abs()
    return Compared(name, False, (f"{int((apart != 0).sum())} of {apart.numel()} values,", f"by {apart.max():.1e}"))


Rows = Mapping[int, JsonObject]
"""Rows of a JSONL file by step."""


@dataclass(frozen=True)
class Span:
    """The steps to repeat: those after the checkpoint ``found`` (None: the base model), up to and including
    ``last``."""

    found: Saved | None
    last: int

    @property
    def first(self) -> int:
        return 1 if self.found is None else self.found.step + 1

    @property
    def steps(self) -> range:
        return range(self.first, self.last + 1)

    @property
    def start(self) -> str:
        return "the base model" if self.found is None else f"the checkpoint of step {self.found.step}"


def span_of(directory: RunDir, rows: Rows, every: int, step: int | None) -> Span:
    """Where to begin, and the step to end with; ``step`` None is the first after the newest checkpoint that has one.

    From the base model it takes no more than ``every`` steps, as many as lie between two checkpoints. Raises
    ``UserError``.
    """
    last, faults = max(rows, default=0), list[str]()
    if not last:
        raise UserError(f"{directory.path} has no finished step yet: its {directory.metrics.name} has no row")
    usable = [e for e in entries(directory.checkpoints) if e.usable and e.step < last]
    before = usable if step is None else [e for e in usable if e.step < step <= last]
    for entry in sorted(before, key=lambda e: (-e.step, e.renamed)):
        why = fault(entry)
        if why is None:
            return _with_rows(Span(whole(entry), step or entry.step + 1), rows, directory)
        faults.append(f"checkpoint {entry.directory.name} is not whole: {why}")
        print(f"warning: {faults[-1]}; an older one is taken", file=sys.stderr)
        usable.remove(entry)
    asked = step or 1
    if asked <= min(every, last):
        return _with_rows(Span(None, asked), rows, directory)
    why = "no checkpoint before it is kept" if asked <= last else f"the run has steps 1 to {last}"
    can = _can(min((e.step for e in usable), default=last), every, last)
    first = f"step {asked} of {directory.path} cannot be replayed: {why}"
    raise UserError("\n".join([first, *faults, f"give one that can: {can}"]))


def _with_rows(span: Span, rows: Rows, directory: RunDir) -> Span:
    """Raises ``UserError`` where a step to compare with has no row."""
    if lacks := [n for n in span.steps if n not in rows]:
        raise UserError(f"{directory.metrics} has no row of step {lacks[0]}, so that there is nothing to compare with")
    return span


def _can(oldest: int, every: int, last: int) -> str:
    """The steps that can be replayed, for a message; ``oldest``: the oldest checkpoint."""
    early = min(every, last)
    if early >= oldest or oldest >= last:
        return f"--step 1 to {last if early >= oldest else early}"
    return f"--step 1 to {early}, from the base model, or {oldest + 1} to {last}"


def fault(entry: Entry) -> str | None:
    """The ``fault_of`` a checkpoint; a run in progress may remove it meanwhile."""
    with Progress(1, "check", "checkpoint") as progress:
        try:
            return fault_of(entry)
        except OSError as error:
            return f"it cannot be read ({error})"
        finally:
            progress.advance()
