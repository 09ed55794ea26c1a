"""Servers on several devices that also train: who asks them, and when the memory of all their devices is free.

The leader of a replica asks its server for samples or verdicts. Its other devices, the members, get no task of a
generate phase; they only make room: before the server wakes they free what torch keeps, and before they train the
server sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from mmrl.placement import device_tasks
from mmrl.placement.adaptive import Moves, Split, State
from mmrl.placement.device_shares import all_of

Put = Callable[[Iterable[int], Callable[..., Any], tuple[Any, ...]], list[Future[Any]]]
"""Give a task to each of some devices."""


class Replicas:
    """Final class. ``leaders``: the devices that ask a server, and the number of its devices; empty: no server has
    several. ``devices``: of the controller."""

    def __init__(self, leaders: Mapping[int, int], devices: int) -> None:
        self._leaders = leaders
        self.members = [device for device in range(devices) if device not in leaders] if leaders else []
        self._awake = False

    def begin(self, put: Put, state: State) -> tuple[Split, Moves] | None:
        """Begin a generate phase: wait until all members have freed what they do not use. Returns its split and moves;
        no device changes its role, in an evaluation either. None without replicas."""
        if not self.members:
            return None
        all_of(put(self.members, device_tasks.free, ()))
        self._awake = True
        return state.split, "never"

    def rest(self, put: Put) -> None:
        """Before training: wait until the servers sleep, if they do (``placement.sleep``)."""
        if self._awake:
            all_of(put(self._leaders, device_tasks.ready, ("train",)))
        self._awake = False

    def busy(self, numbers: dict[str, float], split: Split) -> dict[str, float]:
        """Device-seconds of all devices of a server in place of those of its leader."""
        if not self._leaders:
            return numbers
        of = {"rollout_busy": self._leaders[0], "judge_busy": self._leaders.get(split.rollout, 1)}
        return {name: value * of.get(name, 1) for name, value in numbers.items()}
