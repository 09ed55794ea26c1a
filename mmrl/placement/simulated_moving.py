"""Several controllers in simulated time, whose micro-batches move (``train.balance: moving``): the claims of a run.

A portion is one micro-batch. Those of the first round move; later rounds (replacements of dynamic sampling) stay with
the controller that they are recorded for. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.placement.adaptive import Moves, Split
from mmrl.placement.portions import Claims, Numbers
from mmrl.placement.simulated_devices import MicroBatch, Rounds, SimulatedDevices


class Claimed:
    """Final class: what a controller claims of the first rounds of all, ``lists``. ``moved``: how many were not its
    own."""

    def __init__(self, rank: int, lists: Sequence[Sequence[MicroBatch]], counters: Numbers, devices: int) -> None:
        self.moved = 0
        self._rank, self._lists = rank, lists
        self._claims = Claims(rank, [*map(len, lists)], counters, devices)

    @property
    def left(self) -> int:
        return self._claims.left

    def tell(self, open: float, each: float) -> None:
        self._claims.tell(open, each)

    def next(self) -> MicroBatch | None:
        number = self._claims.own()
        if number is not None:
            return self._lists[self._rank][number]
        found = self._claims.other()
        if found is None:
            return None
        self.moved += 1
        rank, number = found
        return self._lists[rank][number]


def step(controllers: Sequence[SimulatedDevices], shares: Sequence[Rounds], split: Split, moves: Moves) -> int:
    """Simulate the generate phase of a step of all controllers, which share one time. Returns how many micro-batches
    moved."""
    counters, lists = Numbers(), [rounds[0] for rounds in shares]
    claimed = [Claimed(rank, lists, counters, len(one.scheduler.roles)) for rank, one in enumerate(controllers)]
    for devices, rounds, coming in zip(controllers, shares, claimed, strict=True):
        devices.begin(rounds, split, moves, coming)
    controllers[0].time.run()
    return sum(one.moved for one in claimed)
