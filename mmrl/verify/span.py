"""Which steps of a run can be replayed, and from where."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from mmrl.checkpoint.manifest import Entry, entries, fault_of
from mmrl.checkpoint.reader import Saved, whole
from mmrl.errors import UserError
from mmrl.json_types import JsonObject
from mmrl.report.progress import Progress
from mmrl.report.rundir import RunDir

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
    """As ``fault_of``; a run in progress may remove the checkpoint meanwhile."""
    with Progress(1, "check", "checkpoint") as progress:
        try:
            return fault_of(entry)
        except OSError as error:
            return f"it cannot be read ({error})"
        finally:
            progress.advance()
