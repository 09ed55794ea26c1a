"""A step's batch and the slices an update goes through it in, so that no more than one slice's graph is ever held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from mmrl.algorithms.objective import Objective
from mmrl.balance import pack, padded
from mmrl.config.schema import Recipe
from mmrl.controller import Controller
from mmrl.controller.randomness import generator
from mmrl.engines.policy import Policy
from mmrl.pipelines.protocol import Pipeline
from mmrl.rewards.scoring import Failure, RewardSet
from mmrl.trajectory import Prompt, SampleId, Slot, Trajectory
from mmrl.transfer import to_device

if TYPE_CHECKING:
    from mmrl.ahead import Ahead
    from mmrl.controller.workload import Balance
    from mmrl.flight import Flight
    from mmrl.placement.devices import Devices
    from mmrl.resampling import Attempts

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
    balance: Balance | None = None
    """How much work each prompt is; None for pictures, which are all the same."""
    attempts: Attempts | None = None
    """Dynamic sampling, where the recipe asks for it."""
    ahead: Ahead | None = None
    """Steps that are sampled while earlier ones train, where devices train apart."""
    at_once: dict[str, int] = field(default_factory=dict)
    """Rows of a micro-batch that the phases ``sample`` and ``decode`` have memory for, once it has run out."""
    phase: ExitStack = field(default_factory=ExitStack)
    """What this device has entered beside others, and leaves with them (``mmrl.placement.work``)."""


@dataclass
class Batch:
    """The samples of a step on this controller: micro-batches as they were sampled, and a value per row.

    ``places`` say where each row lies: (micro-batch, row in it). ``advantages`` are ``[B]``, or ``[B, T]`` by token.
    ``keys`` are the features it holds; ``prepared`` what was recomputed for the whole batch before the updates and what
    a critic should learn, ``[B, T]`` each; of pictures a column is an entry.
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
    """The slice of an update whose graph is held at once: some rows and some of their entries (actions; one level)."""

    rows: Trajectory
    entries: list[int]
    index: list[int]
    """Where the rows lie in the batch."""
    old: dict[str, Tensor]
    tokens: int
    """Of all rows together, and as they are padded; of pictures their number."""
    padded: int


def slices(run: Run, batch: Batch, mine: list[int], in_step: Callable[[int], int] = int) -> Iterator[Piece]:
    """The slices of one optimizer step over the rows ``mine``: micro-batches of them, entry by entry or a few at once.

    ``in_step`` says how many micro-batches to go through for so many of these rows, where ranks wait for one another
    (``Devices.in_step``): the last one is repeated without weight.
    """
    device = batch.micro_batches[0].clean.device
    train = run.recipe.train
    found = [parts(run.pipeline, t) for t in batch.micro_batches]
    sizes = [found[m][i] for m, i in batch.places]
    own = list(packed(mine, sizes, train.micro_batch_size, train.micro_batch_tokens))
    for n, index in enumerate(own + own[-1:] * (in_step(len(own)) - len(own))):
        rows = gather(batch.micro_batches, [batch.places[n] for n in index])
        groups = to_device(groups_of(rows), device)
        for entries in chunks(chosen(run, rows), train.at_once):
            columns = {"advantages": batch.advantages, "weights": batch.weights, **batch.prepared}
            of = entries if rows.mask is None else slice(rows.clean.shape[1])
            cut = {k: v[index] if v.ndim == 1 else v[index][:, of] for k, v in columns.items()}
            old = {name: to_device(value, device) for name, value in cut.items()} | {"groups": groups}
            old["weights"] = old["weights"] * (n < len(own))
            found = run.pipeline.recorded(rows, entries)
            known = old | recorded(found if run.ahead is None else drawn_before(found), old)
            tokens = sum(sum(sizes[n]) for n in index)
            yield Piece(rows, entries, index, known, tokens, padded([sizes[n] for n in index]))


def without_weight(piece: Piece) -> Piece:
    """The same slice, adding nothing to the update."""
    return replace(piece, old=piece.old | {"weights": torch.zeros_like(piece.old["weights"])})


def parts(pipeline: Pipeline, trajectory: Trajectory) -> list[tuple[int, ...]]:
    """Tokens of each row, by the parts that a micro-batch pads apart: the prompt, and the response drawn to it."""
    lengths = pipeline.lengths(trajectory)
    if trajectory.mask is None:
        return [(n,) for n in lengths]
    return [(n - response, response) for n, response in zip(lengths, trajectory.responses, strict=True)]


def rows_of_update(batch: Batch, update: int, updates: int) -> list[int]:
    """Of every group, the samples whose turn it is: each update sees all prompts."""
    return [n for n, sample in enumerate(batch.ids) if sample.sample % updates == update]


def counted(batch: Batch, rows: list[int]) -> list[int]:
    """Those of ``rows`` that have weight in the update; all where none has, for there must be a slice."""
    return [n for n in rows if batch.weights[n] > 0] or rows


def number_of_entries(run: Run) -> int:
    """How many entries (actions, noise levels) of each sample an update goes through."""
    return run.objective.entries or run.pipeline.entries(run.objective.kind)


def chosen(run: Run, rows: Trajectory) -> list[int]:
    """Those entries: all, or where the objective takes fewer actions than were recorded, a choice that is drawn anew in
    every step and is the same for all rows."""
    n = number_of_entries(run)
    if run.objective.kind != "policy_gradient" or n == run.pipeline.entries(run.objective.kind):
        return list(range(n))
    drawn = generator(run.recipe.seed, rows.ids[0].step, "trained steps")
    return sorted(torch.randperm(run.pipeline.entries(run.objective.kind), generator=drawn)[:n].tolist())


def recorded(own: dict[str, Tensor], prepared: dict[str, Tensor]) -> dict[str, Tensor]:
    """What sampling recorded; log-probs that were recomputed go before those it kept."""
    return {name: value for name, value in own.items() if name not in prepared}


def drawn_before(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """What sampling recorded of pictures, its log-probs ``[B, 1]`` as those of another policy than the one that trains;
    of text they are called so anyhow."""
    if "log_probs" not in own:
        return own
    known = {name: value for name, value in own.items() if name != "log_probs"}
    return known | {"rollout_log_probs": own["log_probs"], "mask": torch.ones_like(own["log_probs"])}


def packed(rows: list[int], sizes: Sequence[Sequence[int]], most: int, tokens: int | None) -> Iterator[list[int]]:
    """``rows`` in micro-batches of at most ``most``; of neighbouring length, and within ``tokens`` with padding where
    given (``mmrl.balance.pack``). ``sizes``: tokens of the parts of every row of the batch.

    Rows of one size keep their order, so that a micro-batch of pictures is updated as it was sampled.
    """
    for index in pack([sizes[n] for n in rows], most, tokens):
        yield [rows[i] for i in index]


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


def groups_of(rows: Trajectory) -> Tensor:
    """The group of each row ``[B]`` int64, numbered from 0 as they come."""
    keys = [(i.step, i.slot, i.attempt) for i in rows.ids]
    number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([number[key] for key in keys])


def of_group(rows: Trajectory) -> Trajectory:
    """``rows`` with the randomness of their group's first sample."""
    return replace(rows, ids=[replace(i, sample=0) for i in rows.ids])


def samples_of(slots: list[Slot], size: int) -> list[tuple[Slot, SampleId]]:
    """The samples of every slot's group, groups contiguous."""
    return [(slot, SampleId(slot.step, slot.index, slot.attempt, k)) for slot in slots for k in range(size)]


def chunks(rows: list[T], size: int) -> Iterator[list[T]]:
    """``rows`` in runs of ``size``, the last one shorter."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
