"""Rewards that compute outside of the devices, in simulated time. Imports no torch."""

from __future__ import annotations

import heapq

from mmrl.placement.tasks import Call


class SimulatedCalls:
    """Final class. The rewards that a controller calls: the requests of each are answered in the order in which they
    come, ``at_once`` at the same time."""

    def __init__(self) -> None:
        self._free: dict[str, list[float]] = {}
        """When each of a reward's turns is free."""

    def answered(self, call: Call, now: float) -> tuple[float, float]:
        """When a call that comes ``now`` begins to be answered, and when it is answered. Its requests take equally
        long. They take their turns before those of later calls."""
        free = self._free.setdefault(call.reward, [])
        free += [now] * (call.at_once - len(free))
        heapq.heapify(free)
        each, began, ended = call.seconds / call.requests, [], now
        for _ in range(call.requests):
            start = max(now, free[0])
            heapq.heapreplace(free, start + each)
            began.append(start)
            ended = max(ended, start + each)
        return min(began), ended
