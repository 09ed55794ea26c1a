"""What a step would have taken under other placements, by the scheduler in simulated time.

After a step each controller does its measured work again under every ``Candidate``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mmrl.placement.adaptive import State, candidates
from mmrl.placement.scheduler import Event, Scheduler
from mmrl.placement.simulated_devices import MicroBatch, Rounds, SimulatedDevices

Done = tuple[float, float]
"""When a task began and ended."""


def tried(scheduler: Scheduler[Any], state: State) -> list[float]:
    """The seconds of the generate phase of the scheduler's step under each candidate; empty if nothing was judged."""
    work = rounds(scheduler.events)
    batches = [batch for one in work for batch in one]
    if not batches or not any(judging for _, judging in batches):
        return []
    found = []
    for candidate in candidates(state.devices, inside=state.inside):
        devices = SimulatedDevices(len(scheduler.roles), scheduler.price("judge"), back=scheduler.price("rollout"))
        devices.scheduler.expect(scheduler)
        devices.step(work, candidate.split, candidate.moves)
        found.append(max(devices.scheduler.done_after("rollout"), devices.scheduler.done_after("judge")))
    return found


def slowest(tried: Sequence[Sequence[float]]) -> list[float]:
    """The seconds of each candidate on the slowest of all controllers, for which the others wait."""
    judged = [one for one in tried if one]
    return [max(seconds) for seconds in zip(*judged, strict=True)]


def rounds(events: Iterable[Event]) -> Rounds:
    """The work of a step's rounds: each sampling with its judging."""
    by_round: dict[int, tuple[list[Done], list[Done]]] = {}
    for event in events:
        if event.role in ("rollout", "judge"):
            by_round.setdefault(event.round, ([], []))[event.role == "judge"].append((event.began, event.ended))
    return [pairs(*by_round[number]) for number in sorted(by_round)]


def pairs(sampled: Iterable[Done], judged: Iterable[Done]) -> list[MicroBatch]:
    """Pair each sampling with its judging, in the order of their ends. If their numbers differ, each sampling gets an
    equal part of all judging."""
    sampled = sorted(sampled, key=lambda done: done[1])
    seconds = [ended - began for began, ended in sorted(judged)]
    if len(seconds) != len(sampled):
        seconds = [sum(seconds) / max(len(sampled), 1)] * len(sampled)
    found = zip(sampled, seconds, strict=True)
    return [(sampling, judging) for _, sampling, judging in sorted((b, e - b, judging) for (b, e), judging in found)]
