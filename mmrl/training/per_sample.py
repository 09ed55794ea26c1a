"""The figures of single held-out samples, for intervals: heldout.jsonl has only their means."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.algorithms.objective import Objective
from mmrl.core.json_types import JsonObject
from mmrl.core.trajectory import Slot
from mmrl.step.batch import MicroBatch

DIGITS = 6
"""Significant digits that are kept of a figure."""
_NEAR = 1e-3
"""How near the sum over single records must be to that of their micro-batch, relative: an objective may compare the
records of a micro-batch, and then a single one has no figure."""
Values = Mapping[str, Sequence[float]]
Places = Sequence[tuple[int, str]]
"""The slot and the prompt of each sample of a controller."""


@dataclass
class PerSample:
    """The figures of each sample of an evaluation, of all controllers, by their names in heldout.jsonl.

    Its mean over samples, weighted by ``weights``, is the figure in heldout.jsonl. NaN: no score.
    """

    prompts: list[str] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    weights: list[float] | None = None
    """Of figures per token the tokens of each record. None: all are 1."""
    more: PerSample | None = None
    """Further samples that the alarm alone reads."""

    def short(self) -> dict[str, list[float | None]]:
        """The figures as they are written: rounded, and None where there is none."""
        return {name: [_short(v) for v in of] for name, of in self.values.items()}

    def row(self) -> JsonObject:
        """A line of heldout_samples.jsonl, without its step."""
        found: JsonObject = {"prompts": self.prompts, "values": self.short()}
        found |= {} if self.weights is None else {"weights": self.weights}
        return found if self.more is None else found | {"more": self.more.row()}


def gathered(everyone: Sequence[tuple[Places, Values]], prefix: str = "") -> PerSample:
    """The samples of all controllers in the order of their slots, which does not depend on the number of controllers.

    ``prefix`` is put before each name. A figure that a controller does not have is NaN there.
    """
    names = dict.fromkeys(name for _, values in everyone for name in values)
    nothing = {index: [math.nan] * len(places) for index, (places, _) in enumerate(everyone)}
    order = sorted((slot, c, i) for c, (places, _) in enumerate(everyone) for i, (slot, _) in enumerate(places))
    return PerSample(
        [everyone[c][0][i][1] for _, c, i in order],
        {prefix + name: [everyone[c][1].get(name, nothing[c])[i] for _, c, i in order] for name in names},
    )


class Records:
    """The figures of given records (pairs, responses): an objective says only the sums of a micro-batch."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._sums: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._places: dict[int, tuple[str, float]] = {}
        self._dropped: set[str] = set()

    def place(self, slots: Sequence[Slot], weights: Tensor, lengths: Tensor) -> None:
        """Take the records of ``slots``; ``weights`` and ``lengths`` ``[B]`` as in ``Batch``."""
        for i, slot in enumerate(slots):
            share = self._objective.loss_denominator(weights[i : i + 1], lengths[i : i + 1])
            self._places[slot.index] = slot.prompt.id, share

    def add(
        self, slots: Sequence[Slot], micro_batch: MicroBatch, new: Mapping[str, Tensor], sums: Mapping[str, Tensor]
    ) -> None:
        """Add a micro-batch of ``slots``, whose figures are ``sums``: the loss of each record by itself."""
        rows = len(micro_batch.index)

        def single(of: Mapping[str, Tensor], i: int) -> dict[str, Tensor]:
            return {k: v[i : i + 1] if v.ndim and len(v) == rows else v for k, v in of.items()}

        alone = [self._objective.loss(single(new, i), single(micro_batch.old, i), 1.0).sums for i in range(rows)]
        for name, whole in sums.items():
            each = torch.stack([one[name].double() for one in alone])
            if not torch.isclose(each.sum(), whole.double(), rtol=_NEAR, atol=_NEAR, equal_nan=True):
                self._dropped.add(name)
            for i, value in zip(micro_batch.index, each.tolist(), strict=True):
                self._sums[slots[i].index][name] += value

    def of_controller(self) -> tuple[list[tuple[int, str]], dict[str, list[float]]]:
        """The places of this controller's records and their figures, for ``gathered``; ``""`` has the weights."""
        order = sorted(self._sums)
        shares = [self._places[index][1] for index in order]
        names = dict.fromkeys(name for index in order for name in self._sums[index] if name not in self._dropped)
        values = {
            name: [
                self._sums[index][name] / share if share else math.nan
                for index, share in zip(order, shares, strict=True)
            ]
            for name in names
        }
        return [(index, self._places[index][0]) for index in order], values | {"": shares}


def of_records(everyone: Sequence[tuple[Places, Values]]) -> PerSample:
    """What ``Records.of_controller`` says on all controllers."""
    found = gathered(everyone)
    found.weights = found.values.pop("", None)
    return found


def _short(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
