"""Which controller begins which prompts of a step, where prompts may move (``train.balance: moving``).

Every controller has a list of *portions*: prompts that fill whole micro-batches. It begins its own from the front. One
that has begun all of its own takes portions from the end of another's list, which that one has not begun, if they end
earlier so. In a run a counter is in the store of the process group, in the simulator it is a number; both run this
code. Imports no torch.

Nobody takes the first portion of a list, so that every controller has something to train on. For the rest a counter
holds how many portions the owner has begun, and how many others have taken (``TAKEN`` each). Adding to it and reading
it are one step, and a claim holds if both together are then at most as many as there are. Of these claims no two have
the same portion: the owner's are the first of the list, the others' the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

TAKEN = 1 << 20
"""What taking a portion of another controller adds to its counter; beginning one of the own adds 1."""


EACH, UNIT = 1 << 31, 1e-4
"""What a controller tells is one number: ``EACH`` times the device-seconds of a portion, plus those of its open work,
both in units of 0.1 ms."""


class Counters(Protocol):
    """Counters that all controllers share."""

    def add(self, number: int, value: int) -> int:
        """Add to a counter and return its sum, as one step; 0 reads it."""
        ...


class Numbers:
    """Final class: the ``Counters`` of controllers in one process."""

    def __init__(self) -> None:
        self._sums: dict[int, int] = {}

    def add(self, number: int, value: int) -> int:
        self._sums[number] = self._sums.get(number, 0) + value
        return self._sums[number]


def ahead(devices: int) -> int:
    """The micro-batches that a controller samples or has ready to sample: one more than devices, so that no device
    waits while the next one is claimed. What is ready cannot move."""
    return devices + 1 if devices > 1 else 1


@dataclass(frozen=True)
class Progress:
    """What a controller still has to do. ``left``: its portions that nobody has begun; ``open``: device-seconds of work
    on those that it has begun; ``each``: device-seconds of a portion there. Both are 0 if it has not told them."""

    left: int
    open: float
    each: float


def slowest(mine: Progress, others: Mapping[int, Progress], devices: int) -> int | None:
    """The controller to take a portion from: the one that would end its last one latest. None if no portion would end
    earlier here. ``devices``: of each controller.

    A portion that is taken begins when what is open here is done; there it would begin when also those before it are.
    A controller with open work takes it only if that saves half a portion's time: what others told is older than that.
    """
    here = mine.open / devices + mine.each
    ends: dict[int, float] = {}
    for rank, other in others.items():
        each = other.each or mine.each
        end = ((other.left - 1) * each + other.open) / devices + each
        margin = each / 2 if mine.open else 0.0
        if other.left and here + margin <= end:
            ends[rank] = end
    return max(ends, key=lambda rank: (ends[rank], -rank), default=None)


class Claims:
    """Controller ``rank`` claims portions. ``lengths``: the portions of every controller's list;
    ``devices``: of each controller.

    Counter ``rank`` has the claims of a list, counter ``len(lengths) + rank`` what its controller has told last.
    """

    def __init__(self, rank: int, lengths: Sequence[int], counters: Counters, devices: int = 1) -> None:
        self._rank, self._lengths, self._counters, self._devices = rank, lengths, counters, devices
        self._first = True
        self.left = lengths[rank]
        """Of the own list, not begun by anybody when this controller last looked."""
        self.over = False
        """Whether nothing was left in any list."""
        self._mine = Progress(0, 0.0, 0.0)
        self._told = 0

    def tell(self, open: float, each: float) -> None:
        """Device-seconds of work on what was begun here, and of a portion. The others hear it with the next claim."""
        self._mine = Progress(0, open, each)

    def own(self) -> int | None:
        """The number of the next portion of the own list; None: all were begun."""
        if self._first:
            self._first, self.left = False, self.left - 1
            return 0
        if not self.left:
            return None
        told = round(self._mine.each / UNIT) * EACH + round((self._mine.open + self._mine.each / 2) / UNIT)
        if told != self._told:
            self._counters.add(len(self._lengths) + self._rank, told - self._told)
            self._told = told
        begun, self.left, held = self._claim(self._rank, 1)
        return begun if held else None

    def other(self) -> tuple[int, int] | None:
        """A portion of another controller: whose, and its number in that one's list. None: nothing is left, or nothing
        that would end earlier here."""
        others = {rank: self._progress(rank) for rank, n in enumerate(self._lengths) if n > 1 and rank != self._rank}
        while (rank := slowest(self._mine, others, self._devices)) is not None:
            begun, left, held = self._claim(rank, TAKEN)
            if held:
                return rank, 1 + begun + left
            del others[rank]
        self.over = not any(other.left for other in others.values())
        return None

    def _claim(self, rank: int, value: int) -> tuple[int, int, bool]:
        """What its controller has begun of a list after the first, what is left of it, and whether the claim holds."""
        begun, taken = _read(self._counters.add(rank, value))
        left = self._lengths[rank] - 1 - begun - taken
        return begun, max(left, 0), left >= 0

    def _progress(self, rank: int) -> Progress:
        begun, taken = _read(self._counters.add(rank, 0))
        left = max(self._lengths[rank] - 1 - begun - taken, 0)
        told = self._counters.add(len(self._lengths) + rank, 0) if left else 0
        return Progress(left, told % EACH * UNIT, told // EACH * UNIT)


def _read(count: int) -> tuple[int, int]:
    """Portions begun by their own controller after the first, and taken by others."""
    return count % TAKEN, count // TAKEN
