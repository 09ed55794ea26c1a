"""Several judges of a recipe: which of them each device has, and how much work each of them has.

The devices that judge are divided among the judges by their work. A device keeps its judge while samples wait for it.
Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from mmrl.placement.adaptive import worth_moving
from mmrl.placement.tasks import Schedulable, recent, trains

T = TypeVar("T", bound=Schedulable)


class Judges:
    """Final class. ``of``: each device's judge, empty before it had one. With one judge it has nothing to do.
    ``alone``: a device has one judge awake at a time."""

    def __init__(self, devices: int) -> None:
        self.of = [""] * devices
        self.alone = False
        self._seconds: dict[str, float] = {}
        """The recent mean of a micro-batch, by judge."""

    @property
    def names(self) -> list[str]:
        return list(self._seconds)

    @property
    def several(self) -> bool:
        return len(self._seconds) > 1

    def know(self, names: Iterable[str]) -> None:
        """These judges will be asked."""
        self._seconds |= {name: 0.0 for name in names if name not in self._seconds}

    def took(self, judge: str, seconds: float) -> None:
        """A micro-batch took so long. ``judge``: empty for another task."""
        if not judge:
            return
        self._seconds[judge] = recent(self._seconds.get(judge, 0.0), seconds)

    def expect(self, other: Judges) -> None:
        """Expect what ``other`` has measured."""
        self._seconds, self.alone = dict(other._seconds), other.alone

    @property
    def each(self) -> float:
        """Device-seconds of judging a micro-batch, by all judges."""
        return sum(self._seconds.values())

    def left(self, tasks: Iterable[Schedulable]) -> float:
        """Device-seconds of tasks of judging."""
        counts = Counter(task.judge for task in tasks)
        return sum(count * self._seconds.get(judge, 0.0) for judge, count in counts.items())

    def divide(self, devices: Sequence[int]) -> None:
        """Give each of ``devices`` a judge, by the work of each; as many as possible keep theirs."""
        if not self.several:
            return
        counts = shares(self._seconds, len(devices))
        free = []
        for device in devices:
            if counts.get(self.of[device], 0):
                counts[self.of[device]] -= 1
            else:
                free.append(device)
        names = [name for name, count in counts.items() for _ in range(count)]
        for device, name in zip(free, names, strict=True):
            self.of[device] = name

    def choose(self, tasks: Sequence[T], device: int, judging: Collection[int], price: float) -> int | None:
        """The place of the task that an idle device takes, of the step that trains first; None: it waits.

        The first for its own judge; without one, that for the judge with the most work per device, if that is worth
        its ``price`` in seconds. ``judging``: all devices that judge now.
        """
        if not self.several:
            return 0
        first = trains(tasks[0])
        places: dict[str, int] = {}
        waits: Counter[str] = Counter()
        for n, task in enumerate(tasks):
            if trains(task) != first:
                break
            places.setdefault(task.judge, n)
            waits[task.judge] += 1
        own = self.of[device]
        if own in places:
            return places[own]
        there = Counter(self.of[other] for other in judging if other != device)
        left = {judge: count * (self._seconds.get(judge) or 1.0) for judge, count in waits.items()}
        judge = max(left, key=lambda name: left[name] / (there[name] + 1))
        fresh = device not in judging or not own
        if fresh or not there[judge] or worth_moving(0.0, left[judge], there[judge], price):
            return places[judge]
        return None

    def at_first(self, device: int, judging: int) -> str:
        """The judge that a device wakes at the start of a phase in which ``judging`` devices judge; empty: all."""
        return self.of[device] if self.several and (self.alone or judging >= len(self._seconds)) else ""

    def preferred(self, tasks: Iterator[T], device: int) -> T:
        """The first of ``tasks``, there is one, or the first for the judge that the device has."""
        first = next(tasks)
        if not self.several or first.judge == self.of[device]:
            return first
        return next((task for task in tasks if task.judge == self.of[device]), first)


def shares(work: dict[str, float], devices: int) -> dict[str, int]:
    """``devices`` divided by ``work``: each has one at least where there are enough, then the one that has the most
    work for each of its devices gets another."""
    ordered = sorted(work, key=lambda name: -work[name])
    counts = dict.fromkeys(ordered, 0)
    for _ in range(devices):
        most = max(ordered, key=lambda name: (not counts[name], (work[name] or 1e-9) / max(counts[name], 1)))
        counts[most] += 1
    return counts
