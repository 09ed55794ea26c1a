"""A step's batch and the slices an update goes through it in, so that no more than one slice's graph is ever held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from mmrl.algorithms.objective import Objective
from mmrl.config.schema import Recipe
from mmrl.controller import Controller
from mmrl.engines.policy import Policy
from mmrl.pipelines.protocol import Pipeline
from mmrl.rewards.scoring import Failure, RewardSet
from mmrl.trajectory import Prompt, SampleId, Slot, Trajectory

if TYPE_CHECKING:
    from mmrl.flight import Flight
    from mmrl.placement.devices import Devices

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """What a step works with; built once by ``mmrl.run``."""

    recipe: Recipe
    controller: Controller
    pipeline: Pipeline
    policy: Policy
    objective: Objective
    rewards: RewardSet
    prompts: Sequence[Prompt]
    device: torch.device
    devices: Devices
    """What computes: this process, or several."""
    critic: Policy | None = None
    """The critic's weights and optimizer, where the objective has one."""
    flight: Flight | None = None
    """Responses that take more than a step, where the recipe cuts them."""


@dataclass
class Batch:
    """The samples of a step on this controller: micro-batches as they were sampled, and a value per row.

    ``places`` say where each row lies: (micro-batch, row in it). ``advantages`` are ``[B]``, or ``[B, T]`` by token.
    ``keys`` are the features it holds; ``prepared`` what was recomputed for the whole batch before the updates and what
    a critic should learn, ``[B, T]`` each.
    """

    micro_batches: list[Trajectory]
    places: list[tuple[int, int]]
    advantages: Tensor
    weights: Tensor
    lengths: Tensor
    keys: list[str] = field(default_factory=list)
    prepared: dict[str, Tensor] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    @property
    def ids(self) -> list[SampleId]:
        return [self.micro_batches[m].ids[i] for m, i in self.places]


@dataclass(frozen=True)
class Piece:
    """The slice of an update whose graph is held at once: some rows and one of their entries (actions, levels)."""

    rows: Trajectory
    entry: int
    index: list[int]
    """Where the rows lie in the batch."""
    old: dict[str, Tensor]


def slices(run: Run, batch: Batch, mine: list[int]) -> Iterator[Piece]:
    """The slices of one optimizer step over the rows ``mine``: micro-batches of them, entry by entry."""
    device = batch.micro_batches[0].clean.device
    train = run.recipe.train
    sizes = [run.pipeline.lengths(t) for t in batch.micro_batches]
    for index in packed(mine, [sizes[m][i] for m, i in batch.places], train.micro_batch_size, train.micro_batch_tokens):
        rows = gather(batch.micro_batches, [batch.places[n] for n in index])
        columns = {"advantages": batch.advantages, "weights": batch.weights, **batch.prepared}
        width = rows.clean.shape[1]
        cut = {k: v[index] if v.ndim == 1 else v[index, :width] for k, v in columns.items()}
        old = {name: value.to(device) for name, value in cut.items()}
        for entry in range(entries(run)):
            yield Piece(rows, entry, index, old | recorded(run.pipeline.recorded(rows, entry), old))


def rows_of_update(batch: Batch, update: int, updates: int) -> list[int]:
    """Of every group, the samples whose turn it is: each update sees all prompts."""
    return [n for n, sample in enumerate(batch.ids) if sample.sample % updates == update]


def entries(run: Run) -> int:
    """How many entries (actions, noise levels) of each sample an update goes through."""
    return run.objective.entries or run.pipeline.entries(run.objective.kind)


def recorded(own: dict[str, Tensor], prepared: dict[str, Tensor]) -> dict[str, Tensor]:
    """What sampling recorded; log-probs that were recomputed go before those it kept."""
    return {name: value for name, value in own.items() if name not in prepared}


def packed(rows: list[int], lengths: list[int], most: int, tokens: int | None) -> Iterator[list[int]]:
    """``rows`` in micro-batches of ``most``; of neighbouring length, and within ``tokens`` with padding where given.

    Equal lengths keep their order, so that a micro-batch of pictures is updated as it was sampled.
    """
    batch: list[int] = []
    for n in sorted(rows, key=lambda n: lengths[n]):
        if batch and (len(batch) == most or (tokens is not None and lengths[n] * (len(batch) + 1) > tokens)):
            yield batch
            batch = []
        batch.append(n)
    if batch:
        yield batch


def gather(micro_batches: list[Trajectory], places: list[tuple[int, int]]) -> Trajectory:
    """The rows at ``places`` (micro-batch, row), in their order; a whole micro-batch is itself, so that its replay has
    its very shape."""
    whole = places[0][0]
    if places == [(whole, i) for i in range(len(micro_batches[whole]))]:
        return micro_batches[whole]
    order = sorted(range(len(places)), key=lambda n: places[n][0])  # stable: by micro-batch
    parts = [micro_batches[m].rows([places[n][1] for n in of]) for m, of in groupby(order, lambda n: places[n][0])]
    joined = parts[0] if len(parts) == 1 else Trajectory.join(parts)
    if order == sorted(order):
        return joined
    return joined.rows(sorted(range(len(order)), key=order.__getitem__))


def samples_of(slots: list[Slot], size: int) -> list[tuple[Slot, SampleId]]:
    """The samples of every slot's group, groups contiguous."""
    return [(slot, SampleId(slot.step, slot.index, slot.attempt, k)) for slot in slots for k in range(size)]


def chunks(rows: list[T], size: int) -> Iterator[list[T]]:
    """``rows`` in runs of ``size``, the last one shorter."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
