"""A controller: its identity among equals, its shard of the slots, and the few numbers it shares with the others.

Every controller runs the same program. This edition runs one; the program is written for many, so that ``total`` and
``slots`` are its only two words for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mmrl.controller.randomness import permutation, seed_of
from mmrl.trajectory import Prompt, Slot

if TYPE_CHECKING:
    import torch

T = TypeVar("T", "float", "torch.Tensor")


@dataclass(frozen=True)
class Controller:
    """Identity ``rank`` of ``size``. Raises ``NotImplementedError`` for a size above 1: the Ray runtime comes later."""

    seed: int
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size != 1:
            raise NotImplementedError("this edition of mmrl runs one controller; several need the Ray runtime to come")

    def total(self, value: T) -> T:
        """The sum of ``value``, a number or a small tensor, over all controllers."""
        return value

    def slots(self, step: int, prompts: Sequence[Prompt], per_step: int) -> list[Slot]:
        """This controller's share of the ``per_step`` slots of ``step``.

        Position ``step * per_step + i`` in an endless sequence of epochs, each its own permutation of ``prompts``.
        """
        slots = []
        orders: dict[int, list[int]] = {}
        for index in range(self.rank, per_step, self.size):
            epoch, place = divmod(step * per_step + index, len(prompts))
            order = orders.get(epoch) or orders.setdefault(epoch, permutation(self.seed, epoch, len(prompts)))
            slots.append(Slot(step, index, 0, prompts[order[place]]))
        return slots

    def replacement(self, slot: Slot, attempt: int, prompts: Sequence[Prompt]) -> Slot:
        """The ``attempt``-th prompt tried in the place of ``slot``: the same whoever runs it."""
        drawn = seed_of(self.seed, slot.step, slot.index, attempt, "replacement") % len(prompts)
        return Slot(slot.step, slot.index, attempt, prompts[drawn])
