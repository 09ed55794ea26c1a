"""Several controllers in simulated time, whose micro-batches move (``train.balance: moving``): the claims of a run.

A portion is one micro-batch. Those of the first round move; later rounds (replacements of dynamic sampling) stay with
the controller that they are recorded for. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.placement.adaptive import Moves, Split
from mmrl.placement.portions import Numbers
from mmrl.placement.simulated_devices import Claimed, Rounds, SimulatedDevices


def step(controllers: Sequence[SimulatedDevices], shares: Sequence[Rounds], split: Split, moves: Moves) -> int:
    """Simulate the generate phase of a step of all controllers, which share one time. Returns how many micro-batches
    moved."""
    counters, lists = Numbers(), [rounds[0] for rounds in shares]
    claimed = [Claimed(rank, lists, counters, len(one.scheduler.roles)) for rank, one in enumerate(controllers)]
    for devices, rounds, coming in zip(controllers, shares, claimed, strict=True):
        devices.begin(rounds, split, moves, coming)
    controllers[0].time.run()
    return sum(one.moved for one in claimed)
