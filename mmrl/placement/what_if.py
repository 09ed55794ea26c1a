"""What a step would have taken under other placements, by the scheduler in simulated time.

After a step each controller does its measured work again under every ``Candidate``. Where its devices sample ahead, it
does the step's work several times in a row, beside training. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from mmrl.core.grouping import grouped
from mmrl.placement.adaptive import Candidate, State, candidates
from mmrl.placement.scheduler import Scheduler
from mmrl.placement.simulated_ahead import SimulatedAhead
from mmrl.placement.simulated_devices import MicroBatch, Rounds, SimulatedDevices
from mmrl.placement.tasks import Call, Event, Schedulable, StepEvents

Done = tuple[float, float]
"""When a task began and ended."""
T = TypeVar("T", bound=Schedulable)
_WORK = ("rollout", "judge", "call")


def measured(scheduler: Scheduler[T]) -> Scheduler[T]:
    """What a scheduler has measured until now; in a run it goes on hearing of devices that sample ahead."""
    found: Scheduler[T] = Scheduler(len(scheduler.roles), lambda: 0.0, scheduler.settings)
    found.expect(scheduler)
    found.events = StepEvents(scheduler.events)
    return found


def of_step(scheduler: Scheduler[Any], state: State, work: Sequence[Event]) -> list[float]:
    """The seconds of the scheduler's step under each candidate; empty if nothing was judged. ``work``: what was done
    for the step that was trained, where it was sampled ahead."""
    if not scheduler.settings.apart:
        return tried(scheduler, state)
    trainers = scheduler.settings.training(len(scheduler.roles))
    return tried_ahead(scheduler, state, work, training(scheduler.events, trainers))


def tried(scheduler: Scheduler[Any], state: State) -> list[float]:
    """The seconds of the generate phase of the scheduler's step under each candidate; empty if nothing was judged."""
    work = rounds(scheduler.events)
    batches = [batch for one in work for batch in one]
    if not batches or not any(batch.judging for batch in batches):
        return []
    found = []
    for candidate in candidates(state.devices, inside=state.inside):
        to_judge, back = scheduler.price("judge"), scheduler.price("rollout")
        devices = SimulatedDevices(len(scheduler.roles), to_judge, back=back, settings=scheduler.settings)
        devices.scheduler.expect(scheduler)
        devices.step(work, candidate.split, candidate.moves)
        found.append(devices.scheduler.events.done_after("rollout", "judge", "call"))
    return found


def training(events: Iterable[Event], trainers: int) -> float:
    """The seconds from the begin of a step's training to its end; 0 if nothing was trained."""
    own = [event for event in events if event.role == "train" and event.device < trainers]
    return max((event.ended for event in own), default=0.0) - min((event.began for event in own), default=0.0)


def tried_ahead(scheduler: Scheduler[Any], state: State, done: Iterable[Event], trained: float) -> list[float]:
    """The seconds between two updates under each candidate, if every step had the work of one, ``done``, and took
    ``trained`` seconds of training beside it; empty if nothing was judged."""
    work = rounds(done)
    if not any(batch.judging for one in work for batch in one):
        return []
    known = candidates(state.devices, inside=state.inside, ahead=True)
    return [_period(scheduler, candidate, work, trained) for candidate in known]


def _period(scheduler: Scheduler[Any], candidate: Candidate, work: Rounds, trained: float) -> float:
    """The mean of two steps that have others before them and after them."""
    settings, staleness = scheduler.settings, scheduler.settings.staleness or 1
    to_judge, back, home = (scheduler.price(role) for role in ("judge", "rollout", "train"))
    devices = SimulatedDevices(len(scheduler.roles), to_judge, back=back, home=home, settings=settings)
    devices.scheduler.expect(scheduler)
    devices.apart(candidate.split, candidate.moves)
    devices.warm()
    count = 2 * staleness + 3
    run = SimulatedAhead(
        [devices],
        [[work]] * count,
        [trained] * count,
        staleness,
        lambda step: devices.apart(candidate.split, candidate.moves),
        lend=settings.lend,
    )
    ends = run.trained()
    return (ends[-1 - staleness] - ends[staleness]) / 2


def slowest(tried: Sequence[Sequence[float]]) -> list[float]:
    """The seconds of each candidate on the slowest of all controllers, for which the others wait."""
    judged = [one for one in tried if one]
    return [max(seconds) for seconds in zip(*judged, strict=True)]


def rounds(events: Iterable[Event]) -> Rounds:
    """The work of a step's rounds: each sampling with its judging, and with its calls outside of the devices."""
    by_round: dict[int, dict[str, list[Event]]] = {}
    for event in events:
        if event.role in _WORK:
            by_round.setdefault(event.round, {role: [] for role in _WORK})[event.role].append(event)
    found = []
    for _, of in sorted(by_round.items()):
        sampled = [(event.began, event.ended) for event in of["rollout"]]
        called = sorted((event.began, event.call) for event in of["call"] if event.call is not None)
        judged = grouped((event.judge, (event.began, event.ended)) for event in of["judge"])
        parts = {judge: pairs(sampled, done) for judge, done in sorted(judged.items())}
        whole = pairs(sampled, [], [call for _, call in called])
        found.append(
            [_joined(batch, {judge: part[n] for judge, part in parts.items()}) for n, batch in enumerate(whole)]
        )
    return found


def _joined(batch: MicroBatch, judged: Mapping[str, MicroBatch]) -> MicroBatch:
    """``batch`` with the judging of each judge."""
    seconds = {judge: part.judging for judge, part in judged.items()}
    several = tuple(seconds.items()) if seconds.keys() - {""} else ()
    return batch._replace(judging=sum(seconds.values()), judges=several)


def pairs(sampled: Iterable[Done], judged: Iterable[Done], calls: Sequence[Call] = ()) -> list[MicroBatch]:
    """Pair each sampling with its judging, in the order of their ends. If their numbers differ, each sampling gets an
    equal part of all judging. ``calls``, in their order, are divided among the samplings alike."""
    sampled = sorted(sampled, key=lambda done: done[1])
    seconds = [ended - began for began, ended in sorted(judged)]
    if len(seconds) != len(sampled):
        seconds = [sum(seconds) / max(len(sampled), 1)] * len(sampled)
    ends = [len(calls) * n // max(len(sampled), 1) for n in range(len(sampled) + 1)]
    own = [tuple(calls[first:end]) for first, end in pairwise(ends)]
    found = zip(sampled, seconds, own, strict=True)
    return [MicroBatch(e - b, judging, its) for (b, e), judging, its in sorted(found, key=lambda one: one[0])]
