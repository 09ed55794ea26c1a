"""Score a step while its samples are still being made: running batches, failures, normalisation."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mmrl.algorithms.advantages import AllSum, alone, batch_statistics
from mmrl.config import schema
from mmrl.core.episode import REWARD
from mmrl.core.errors import UserError
from mmrl.core.grouping import grouped
from mmrl.core.reward_contract import Context, Span
from mmrl.core.trajectory import Sample, SampleId
from mmrl.rewards.calling import Calls
from mmrl.rewards.loading import Loaded
from mmrl.rewards.patience import Patience
from mmrl.rewards.returned import NAN, Answer, BatchError

STD_FLOOR = 1e-4
"""Added to the standard deviations that rewards are divided by."""
LARGEST = 1e30
"""What a reward, and what counts of it, must not exceed."""
_NAMED = 5


class RewardError(UserError):
    """A reward failed where its policy says ``fail``."""


@dataclass(frozen=True)
class Failure:
    """A sample that the reward called ``reward`` could not score, and why."""

    sample: SampleId
    prompt: str
    reward: str
    reason: str


@dataclass(frozen=True)
class Scores:
    """The rewards of ``B`` samples; tensors are float64 on the CPU.

    ``total`` ``[B]``: the weighted sum of the normalised rewards, NaN where a sample is to be dropped. ``parts``: each
    reward's raw values ``[B]`` under its label, and its named parts under ``label/part``. ``spans``: for a reward that
    declares them, the rewards of pieces of each response as it returned them (no weight, no normalisation); None where
    the sample failed. ``seconds``: the time, by label, in which a reward had at least one running call. ``waited``:
    how long ``finish`` waited for them; the rest ran at the same time as sampling, or as another reward. ``steps``
    ``[B, T]``: the totals of the results predicted before each recorded step, where the algorithm has them scored.
    ``feedback``: by label a text about each sample, of the rewards that gave any.
    """

    total: torch.Tensor
    parts: dict[str, torch.Tensor]
    failures: list[Failure] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    spans: dict[str, list[list[Span] | None]] = field(default_factory=dict)
    waited: float = 0.0
    steps: torch.Tensor | None = None
    feedback: dict[str, list[str | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """One reward of a recipe, ready to be called."""

    label: str
    config: schema.Reward
    loaded: Loaded
    caller: Calls
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes it gave to other processes so far, by kind."""

    @property
    def grouped(self) -> bool:
        return self.loaded.declaration.per == "group"


@dataclass(frozen=True)
class _Call:
    """A running call of one reward: the indices of its samples, and the future of its answer."""

    entry: Entry
    index: tuple[int, ...]
    answer: Future[Answer]
    again: set[int] = field(default_factory=set)
    """The samples that were asked for again: a later call answers for them."""


class Scoring:
    """The scoring of one step, in the rewards' own threads. Made by ``RewardSet.start``; used by one thread.

    Consumes samples (``add``), waits for the rewards (``finish``), and is unblocked by them or by their deadlines.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        step: int,
        device: torch.device | str,
        folder: Path | None,
        group_size: int | None,
        all_sum: AllSum | None,
        number: int = 0,
        patience: Patience | None = None,
        longest: float = math.inf,
        *,
        feedback: bool = False,
    ) -> None:
        self.samples: dict[int, Sample] = {}
        self._entries, self._step, self._all_sum = entries, step, all_sum
        self._contexts = {
            e.label: Context(step, device, folder, e.label, e.sent, number, patience=longest, feedback=feedback)
            for e in entries
        }
        self._group_size, self._patience = group_size, patience
        self._open: dict[tuple[int, int, int], list[int]] = {}
        self._whole: set[frozenset[int]] = set()
        self._calls: list[_Call] = []
        self._unread: list[_Call] = []

    def add(self, samples: Sequence[Sample], rows: Sequence[int] | int | None = None) -> None:
        """Add samples; the rewards start on them, and this returns at once.

        ``rows``: their indices, or the index of the first of them; None: after the last one added. Raises
        ``RewardError`` when a sample lacks what a reward reads, or a reward whose policy is ``fail`` has failed.
        """
        self._unread = [call for call in self._unread if not call.answer.done() or self._refuse(call)]
        if not isinstance(rows, Sequence):
            first = len(self.samples) if rows is None else rows
            rows = range(first, first + len(samples))
        self.samples.update(zip(rows, samples, strict=True))
        for entry in self._entries:
            check_inputs(entry, samples)
            if not entry.grouped:
                for batch in batches(entry, rows, samples):
                    self._submit(entry, batch)
        for row, sample in zip(rows, samples, strict=True):
            group = self._open.setdefault((sample.id.step, sample.id.slot, sample.id.attempt), [])
            group.append(row)
            if len(group) == self._group_size:
                self._submit_group(group)

    def finish(self, groups: Sequence[Sequence[int]]) -> Scores:
        """Wait for the rewards; ``groups`` hold each index of the samples, in the order they were added, once.

        Raises ``RewardError`` when a reward whose policy is ``fail`` leaves a sample without a score, and
        ``UnscoredError`` where too many have none for too long.
        """
        n = len(self.samples)
        if set(self.samples) != set(range(n)) or sorted(i for group in groups for i in group) != list(range(n)):
            raise ValueError(f"groups must hold each of the {n} samples once, got {groups}")
        given = {frozenset(group) for group in groups}
        if not self._whole <= given:
            raise ValueError(f"the samples of a slot and attempt were scored as a group, and are none in {groups}")
        for group in groups:
            if len(group) and frozenset(group) not in self._whole:
                self._submit_group(group)
        began = time.perf_counter()
        self._wait()
        if self._patience is not None:
            self._patience.wait(self, self._step, together=self._all_sum is not None)
        scores = Scores(torch.zeros(n, dtype=torch.float64), {}, waited=time.perf_counter() - began)
        for entry in self._entries:
            pieces = self._gather(entry, scores)
            if entry.loaded.declaration.spans:
                scores.spans[entry.label] = pieces
        scores = replace(scores, total=total_of(self._entries, scores.parts, groups, self._all_sum))
        for row, why in self.lost().items():
            scores.total[row] = math.nan
            scores.failures.append(Failure(self.samples[row].id, self.samples[row].prompt.text, REWARD, why))
        for sample in self.samples.values():
            if sample.episode is not None and sample.episode.unclosed:
                why = sample.episode.unclosed
                scores.failures.append(Failure(sample.id, sample.prompt.text, f"{REWARD}.close", why))
        return scores

    def __len__(self) -> int:
        return len(self.samples)

    def lost(self) -> dict[int, str]:
        """The samples whose episode failed, and why: no reward can mend them."""
        episodes = {row: sample.episode for row, sample in self.samples.items()}
        return {row: one.failure for row, one in episodes.items() if one is not None and one.end == "failed"}

    def failed(self) -> list[tuple[str, str]]:
        """The reward that counts and its reason, for each sample that has no score. All calls have returned."""
        found: dict[int, tuple[str, str]] = {}
        for call in self._calls:
            if call.entry.config.weight != 0:
                found |= {row: (call.entry.label, why) for row, why in self._failures(call).items()}
        return [why for row, why in found.items() if row not in self.lost()]

    def again(self) -> None:
        """Ask once more for what has failed, in the batches that failed where they failed whole, and wait."""
        for call in list(self._calls):
            rows = list(self._failures(call))
            if rows:
                rows = list(call.index) if call.entry.grouped else rows
                call.again.update(rows)
                self._submit(call.entry, rows)
        self._wait()

    def cancel(self) -> None:
        """Forget the batches that have not begun."""
        for call in self._calls:
            call.answer.cancel()

    def _submit(self, entry: Entry, index: Iterable[int]) -> None:
        rows = tuple(index)
        answer = entry.caller.submit([self.samples[i] for i in rows], self._contexts[entry.label])
        self._calls.append(_Call(entry, rows, answer))
        self._unread.append(self._calls[-1])

    def _submit_group(self, group: Sequence[int]) -> None:
        self._whole.add(frozenset(group))
        for entry in self._entries:
            if entry.grouped:
                self._submit(entry, group)

    def _wait(self) -> None:
        try:
            for call in self._calls:
                call.answer.result()
                self._refuse(call)
        except BaseException:
            self.cancel()
            raise

    def _gather(self, entry: Entry, scores: Scores) -> list[list[Span] | None]:
        """Enter one reward's answers into ``scores``; returns its spans."""
        raw = torch.full((len(self.samples),), NAN, dtype=torch.float64)
        pieces: list[list[Span] | None] = [None] * len(raw)
        busy: list[tuple[float, float]] = []
        scores.parts[entry.label] = raw
        declared = entry.loaded.declaration.spans
        for call in (c for c in self._calls if c.entry is entry):
            answer, reasons = call.answer.result(), self._reasons(call)
            busy.append((answer.began, answer.ended))
            kept = [(i, row) for i, row in enumerate(call.index) if row not in call.again]
            for name, values in answer.parts.items():
                part = scores.parts.setdefault(f"{entry.label}/{name}", torch.full_like(raw, NAN))
                for i, row in kept:
                    part[row] = values[i]
            for i, row in kept if any(answer.feedback) else ():
                scores.feedback.setdefault(entry.label, [None] * len(raw))[row] = answer.feedback[i]
            for i, row in kept:
                reason = reasons[i]
                if reason is None:
                    raw[row], pieces[row] = answer.total[i], _in_episode(answer.spans[i], self.samples[row], declared)
                else:
                    scores.failures.append(self._failure(entry, row, reason))
        scores.seconds[entry.label] = _covered(busy)
        return pieces

    def _failures(self, call: _Call) -> dict[int, str]:
        """Why samples of a batch have no score, but for those that were asked for again."""
        reasons = zip(call.index, self._reasons(call), strict=True)
        return {row: why for row, why in reasons if why is not None and row not in call.again}

    def _reasons(self, call: _Call) -> list[str | None]:
        """Why each sample of a batch has no score; also where its spans are missing or lie outside its text."""
        answer = call.answer.result()
        declared = call.entry.loaded.declaration.spans
        if not declared:
            return answer.reasons
        return [
            reason or _misplaced(spans, self.samples[row], declared)
            for row, spans, reason in zip(call.index, answer.spans, answer.reasons, strict=True)
        ]

    def _refuse(self, call: _Call) -> bool:
        """Raise where a finished batch stops the run; False otherwise."""
        if call.entry.config.on_failure == "fail":
            failed = [
                self._failure(call.entry, row, reason)
                for row, reason in zip(call.index, self._reasons(call), strict=True)
                if reason is not None
            ]
            if failed:
                self.cancel()
                raise _refusal(call.entry, call.answer.result(), failed, len(call.index), self._step)
        return False

    def _failure(self, entry: Entry, row: int, reason: str) -> Failure:
        sample = self.samples[row]
        return Failure(sample.id, sample.prompt.text, entry.label, reason)


def total_of(
    entries: Sequence[Entry],
    parts: Mapping[str, torch.Tensor],
    groups: Sequence[Sequence[int]],
    all_sum: AllSum | None,
) -> torch.Tensor:
    """The weighted sum ``[B]`` of the normalised rewards, whose raw values ``parts`` holds by label.

    ``groups`` and ``all_sum`` are ``normalise``'s; with None what is normalised by the batch stays as it is.
    """
    total = torch.zeros(sum(len(group) for group in groups), dtype=torch.float64)
    for entry in entries:
        how = "none" if all_sum is None and entry.config.normalize == "batch" else entry.config.normalize
        normal = normalise(parts[entry.label], groups, how, all_sum or alone)
        if entry.config.weight != 0:  # a reward of weight 0 is watched only, so it drops no sample
            total += entry.config.weight * normal
            _check_size(entry, parts[entry.label], entry.config.weight * normal)
    return total


def _check_size(entry: Entry, raw: torch.Tensor, weighted: torch.Tensor) -> None:
    """Raise ``RewardError`` where values are so large that they, or advantages of them, leave the range of numbers."""
    bad = ~raw.isnan() & ~((raw.abs() <= LARGEST) & (weighted.abs() <= LARGEST))
    if bad.any():
        row = int(bad.nonzero()[0])
        raise RewardError(
            f"reward {entry.label!r} ({entry.loaded.place}) returned {raw[row].item():g}, which is {weighted[row]:g} "
            f"after normalize: {entry.config.normalize} and weight {entry.config.weight:g}; advantages are float32, so "
            f"keep both below {LARGEST:g}: return smaller values, or lower its weight"
        )


def normalise(raw: torch.Tensor, groups: Sequence[Sequence[int]], how: str, all_sum: AllSum = alone) -> torch.Tensor:
    """Bring one reward ``[B]`` to a common scale, ignoring NaN; standard deviations are of the population, + 1e-4.

    ``none``: as it is; ``batch``: divided by the batch's standard deviation; ``group``: centred and divided by the
    standard deviation in each group.
    """
    if how == "none":
        return raw
    if how == "batch":
        return raw / (batch_statistics(raw, ~raw.isnan(), all_sum)[1].sqrt() + STD_FLOOR)
    result = raw.clone()
    for group in groups:
        rows = raw[list(group)]
        valid = rows[~rows.isnan()]
        if len(valid):
            result[list(group)] = (rows - valid.mean()) / (valid.std(correction=0) + STD_FLOOR)
    return result


def batches(entry: Entry, rows: Sequence[int], samples: Sequence[Sample]) -> list[Sequence[int]]:
    """``rows``, those of ``samples``, in runs of the reward's batch size; where it reads tensors, which it may stack,
    each of one shape."""
    size = entry.config.batch_size or max(len(rows), 1)
    parts = [rows]
    if "tensor" in entry.loaded.declaration.inputs:
        shapes = (tuple(sample.tensor.shape) if sample.tensor is not None else () for sample in samples)
        parts = [*grouped(zip(shapes, rows, strict=True)).values()]
    return [part[first : first + size] for part in parts for first in range(0, len(part), size)]


def check_inputs(entry: Entry, samples: Sequence[Sample]) -> None:
    """Raise ``RewardError`` where a sample lacks a field that the reward declared as an input."""
    for name in entry.loaded.declaration.inputs:
        if any(getattr(sample, name) is None for sample in samples):
            raise RewardError(
                f"reward {entry.label!r} ({entry.loaded.place}) reads {name!r}, which the samples do not have; "
                f"declare what it reads with @mmrl.reward(inputs=(...)), or use a pipeline that makes {name!r}"
            )


def _refusal(entry: Entry, answer: Answer, failed: list[Failure], n: int, step: int) -> RewardError:
    named = [f"{f.prompt!r} (slot {f.sample.slot}, sample {f.sample.sample})" for f in failed[:_NAMED]]
    more = f", and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
    error: BatchError | None = answer.error
    mend = error.mend if error else f"see why {entry.loaded.place} has no number for them"
    at = f"at step {step}" if step >= 0 else "outside training"
    return RewardError(
        f"reward {entry.label!r} ({entry.loaded.name}) {failed[0].reason}\n"
        f"  {at}, for {len(failed)} of a batch of {n}: {', '.join(named)}{more}\n"
        f"  {mend + '; or set' if mend else 'Or set'} on_failure: drop for this reward, to leave such samples out of "
        "the update (they are counted and named)"
    )


def _in_episode(spans: list[Span] | None, sample: Sample, declared: bool | str) -> list[Span] | None:
    """Spans of the last turn as those of the whole episode."""
    if not spans or declared in ("episode", "token") or sample.episode is None:
        return spans
    first = sample.episode.starts[-1]
    return [Span(start + first, end + first, value) for start, end, value in spans]


def _misplaced(spans: list[Span] | None, sample: Sample, declared: bool | str) -> str | None:
    if spans is None:
        return "returned no spans"
    length = len(sample.transcript if declared == "episode" else sample.text or "")
    if declared == "token":
        length = 0 if sample.tokens is None else sample.tokens.count
    beyond = next((span for span in spans if span.end > length), None)
    what = "response of {} written tokens" if declared == "token" else "text of {} characters"
    return None if beyond is None else f"returned the span {tuple(beyond)} of a {what.format(length)}"


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of ``(began, ended)``."""
    total, until = 0.0, -math.inf
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total
