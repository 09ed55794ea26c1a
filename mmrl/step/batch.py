"""The data of a step: the sampled rounds, the training batch, and the slices of an update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from mmrl.config.sampling import Sampling, TextSampling
from mmrl.core.trajectory import PerToken, Prompt, Rows, SampleId, Slot, TextRows
from mmrl.data.buckets import by_size
from mmrl.rewards.scoring import Failure, Scores
from mmrl.step.step_metrics import Sums

T = TypeVar("T")


@dataclass(frozen=True)
class Round:
    """Groups that were sampled and scored together, one group of rows per slot, in the order of ``slots``.

    ``order``: the rows in the order of ``micro_batches``; None if that is their own order. ``measured``: metrics of how
    the round was sampled.
    """

    slots: list[Slot]
    keys: list[str]
    micro_batches: Sequence[Rows]
    scores: Scores
    order: list[int] | None = None
    measured: Sums | None = None

    def places(self, first: int) -> list[tuple[int, int]]:
        """The (micro-batch, row in it) of each row; the first of its micro-batches is number ``first``."""
        found = [(first + m, i) for m, rows in enumerate(self.micro_batches) for i in range(len(rows))]
        if self.order is None:
            return found
        return [place for _, place in sorted(zip(self.order, found, strict=True))]


@dataclass(frozen=True)
class Groups:
    """What was sampled and scored for a step, and which of it the step trains on.

    ``rounds``: all of them, with groups that were replaced. ``chosen``: for each slot the (round, group in it).
    ``size``: the samples of a group.
    """

    rounds: Sequence[Round]
    chosen: Sequence[tuple[int, int]]
    size: int

    @classmethod
    def of_round(cls, whole: Round, size: int) -> Groups:
        """Each slot trains on its own group of a single round."""
        return cls([whole], [(0, n) for n in range(len(whole.slots))], size)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """The (round, sample in it) of each of the ``B`` rows; the rows of a group are contiguous."""
        return [(r, n * self.size + k) for r, n in self.chosen for k in range(self.size)]

    @property
    def of_row(self) -> Tensor:
        """The number of each row's group, ``[B]`` int64."""
        return torch.arange(len(self.chosen)).repeat_interleave(self.size)

    def column(self, values: Callable[[Scores], Tensor]) -> Tensor:
        """The rows ``[B]`` of what ``values`` takes from the scores of a round, a value per sample."""
        return torch.cat([values(self.rounds[r].scores)[n * self.size : (n + 1) * self.size] for r, n in self.chosen])

    @property
    def steps(self) -> Tensor | None:
        """The rewards ``[B, T]`` of what was predicted before each recorded step; None where nobody asked for them."""
        parts = [(self.rounds[r].scores.steps, n * self.size) for r, n in self.chosen]
        found = [of[first : first + self.size] for of, first in parts if of is not None]
        return torch.cat(found) if found else None


@dataclass
class Batch:
    """The samples of a step on this controller: micro-batches as they were sampled, and values per row.

    ``places``: the (micro-batch, row in it) of each of the ``B`` rows. ``advantages``: ``[B]``, or ``[B, T]`` per
    token. ``weights``: ``[B]``, 0 for rows left out of the update. ``lengths``: ``[B]``, tokens or denoising steps.
    ``keys``: the features in the store that the batch uses. ``prepared``: ``[B, T]`` each, tensors recomputed before
    the updates (log-probs, values) and the critic's targets; for pictures a column is a denoising step.
    """

    micro_batches: Sequence[Rows]
    places: list[tuple[int, int]]
    advantages: Tensor
    weights: Tensor
    lengths: Tensor
    keys: list[str] = field(default_factory=list)
    prepared: dict[str, Tensor] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """The raw rewards by label, ``[B]``; NaN if a sample has none."""
    slots: Sequence[Slot] = ()
    """This controller's first slots, without replacements."""

    @property
    def ids(self) -> list[SampleId]:
        return [self.micro_batches[m].ids[i] for m, i in self.places]

    @property
    def texts(self) -> list[TextRows]:
        """The micro-batches, where text was sampled; else none."""
        return [rows for rows in self.micro_batches if isinstance(rows, TextRows)]

    def of_tokens(self, name: PerToken) -> Tensor:
        """Texts: the column ``name`` of their tokens, ``[B, T]`` float32 on the CPU, 0 behind each response."""
        columns = [rows.padded(name).float().cpu() for rows in self.texts]
        out = torch.zeros(len(self.places), max(column.shape[1] for column in columns))
        for n, (m, i) in enumerate(self.places):
            out[n, : columns[m].shape[1]] = columns[m][i]
        return out


@dataclass(frozen=True)
class MicroBatch:
    """A slice of an update, computed in one forward and backward pass: some rows, and some entries of each (denoising
    steps, or one noise level; all tokens of text)."""

    rows: Rows
    entries: list[int]
    index: list[int]
    """The places of the rows in the batch."""
    old: dict[str, Tensor]
    """Tensors from sampling: advantages, weights, groups, and log-probs if they were recorded."""
    tokens: int
    """Tokens of all rows; ``padded`` counts padding too. For pictures the number of rows."""
    padded: int


def without_weight(micro_batch: MicroBatch) -> MicroBatch:
    """The same slice with weight 0: it adds nothing to the update."""
    return replace(micro_batch, old=micro_batch.old | {"weights": torch.zeros_like(micro_batch.old["weights"])})


def rows_of_update(batch: Batch, update: int, updates: int) -> list[int]:
    """The rows of one of the step's ``updates``: the samples of each group are divided over them, so that every update
    sees all prompts."""
    seen: Counter[tuple[int, int, int]] = Counter()
    found = []
    for n, name in enumerate(batch.ids):
        group = (name.step, name.slot, name.attempt)
        if seen[group] % updates == update:
            found.append(n)
        seen[group] += 1
    return found


def rows_with_weight(batch: Batch, rows: list[int], *, whole: bool = False) -> list[int]:
    """Those of ``rows`` with a weight above 0; ``whole``: all rows of their groups. All of them if there are none,
    because every rank needs a slice for collectives."""
    if whole:
        groups = [(i.step, i.slot, i.attempt) for i in batch.ids]
        kept = {groups[n] for n in rows if batch.weights[n] > 0}
        return [n for n in rows if groups[n] in kept] or rows
    return [n for n in rows if batch.weights[n] > 0] or rows


def gather(micro_batches: Sequence[Rows], places: list[tuple[int, int]]) -> Rows:
    """The rows at ``places`` (micro-batch, row), in this order. A whole micro-batch is returned as it is, so that its
    replay has the shape of its sampling."""
    whole = places[0][0]
    if places == [(whole, i) for i in range(len(micro_batches[whole]))]:
        return micro_batches[whole]
    order = sorted(range(len(places)), key=lambda n: places[n][0])  # stable: by micro-batch
    parts = [micro_batches[m].rows([places[n][1] for n in of]) for m, of in groupby(order, lambda n: places[n][0])]
    joined = parts[0] if len(parts) == 1 else Rows.join(parts)
    if order == sorted(order):
        return joined
    return joined.rows(sorted(range(len(order)), key=order.__getitem__))


def groups_of(rows: Rows) -> Tensor:
    """The group of each row ``[B]`` int64, numbered from 0 in the order of the rows."""
    keys = [(i.step, i.slot, i.attempt) for i in rows.ids]
    number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([number[key] for key in keys])


def with_group_noise(rows: Rows) -> Rows:
    """``rows`` with the random seeds of their group's first sample, so that a group shares its noise."""
    return replace(rows, ids=[replace(i, sample=0) for i in rows.ids])


def samples_of(slots: list[Slot], size: int) -> list[tuple[Slot, SampleId]]:
    """The samples of every slot's group, groups contiguous."""
    return [(slot, SampleId(slot.step, slot.index, slot.attempt, k)) for slot in slots for k in range(size)]


def chunks_of_a_size(prompts: Sequence[Prompt], sampling: Sampling | TextSampling, most: int) -> Iterator[list[int]]:
    """The indices of ``prompts`` in runs of ``most``, each of prompts that are sampled at one size: as ``chunks`` where
    there is one size."""
    for alike in by_size(prompts, sampling):
        yield from chunks(alike, most)


def chunks(rows: list[T], size: int) -> Iterator[list[T]]:
    """``rows`` in runs of ``size``, the last one shorter."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
