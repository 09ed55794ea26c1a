"""Track the progress of a process of a run: its phase, how long it has shown no progress there, and who waits for whom.

A phase that was finished a few times is measured by its usual time. Before that it may be slow for good reasons
(loading, compiling, downloads), so only a phase without any sign of progress counts as stuck: nothing computed, read or
written, and no part of the work finished.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from mmrl.core.garbage import rarely_collected
from mmrl.core.notices import Pulse

TIMES = 10
"""A phase that takes this many times its usual time counts as stuck; one that only computes, after so many times the
patience."""
BETWEEN = "the time between phases"
OPEN = ("load", "save", BETWEEN)
"""Phases whose time says nothing about the next."""
_KNOWN = 3
"""Number of completed phases after which the usual time is known."""
_QUIET = 1.0
"""Seconds without a mark of progress after which others are looked for."""
_NAMED = 4
"""How many processes a message names."""

P = TypeVar("P")


@dataclass(frozen=True)
class Stuck:
    """A phase without progress for ``seconds``. ``usual``: its usual seconds, 0 if they are not known. ``place``: the
    line of Python that it is in."""

    phase: str
    seconds: float
    usual: float
    place: str = ""

    def __str__(self) -> str:
        if self.usual:
            said = f"{self.phase} has taken {self.seconds:.0f} s, and usually takes {self.usual:.1f} s"
        else:
            said = f"{self.phase} has shown no progress for {self.seconds:.0f} s (runtime.patience)"
        return f"{said}; it is in {self.place}" if self.place else said


@dataclass(frozen=True)
class Sign:
    """What a process says of itself. ``busy``: it is in a phase. ``waits``: it waits for others, to be checked first.
    ``begun``: how many collectives it has begun, by process group."""

    stuck: Stuck | None = None
    busy: bool = False
    waits: bool = False
    begun: Mapping[str, int] | None = None


def blamed(signs: Mapping[P, Sign], workers: Callable[[P], Collection[P]] | None = None) -> list[P]:
    """The processes that are stuck and wait for nobody; or all that are in a phase, if each of them is stuck.

    A process waits if it has begun more collectives of a group than another, or if one of its ``workers`` has a task.
    """
    least: dict[str, int] = {}
    for sign in signs.values():
        for group, n in (sign.begun or {}).items():
            least[group] = min(n, least.get(group, n))

    def waits(place: P) -> bool:
        sign = signs[place]
        return sign.waits or any(n > least[group] for group, n in (sign.begun or {}).items())

    busy = [place for place, sign in signs.items() if sign.busy]
    stuck = [place for place in busy if signs[place].stuck is not None]
    at_work = {place: [w for w in (workers(place) if workers else ()) if w in busy and not waits(w)] for place in stuck}
    return [p for p in stuck if not waits(p) and not at_work[p]] or (stuck if len(stuck) == len(busy) else [])


def no_progress(
    signs: Mapping[P, Sign], name: Callable[[P], str], workers: Callable[[P], Collection[P]] | None = None
) -> str:
    """Who of ``blamed`` makes no progress, and where; empty if nobody."""
    said = [f"{name(place)} makes no progress: {signs[place].stuck}" for place in blamed(signs, workers)]
    return "; ".join(said[:_NAMED]) + (f"; and {len(said) - _NAMED} more" if len(said) > _NAMED else "")


class StallWatchdog(Pulse):
    """Final class. A second thread checks the one that runs phases.

    ``shortest``: seconds before which no phase counts as stuck. ``least``: the same by phase. ``hidden``: phases that
    overlap with others and usually take no time: their usual time is that of all phases together. ``patience``: seconds
    without progress after which a phase counts as stuck whose usual time is not known. ``works``: whether the process
    has computed, read or written since the last call; it gets the identity of the thread.
    """

    def __init__(
        self,
        shortest: float,
        least: Mapping[str, float] | None = None,
        hidden: Collection[str] = (),
        patience: float = 120.0,
        works: Callable[[int], bool] = lambda thread: False,
    ) -> None:
        super().__init__()
        self._shortest, self._least, self._hidden = shortest, dict(least or {}), hidden
        self._patience, self._works = max(shortest, patience), works

    def sign(self, begun: Mapping[str, int]) -> Sign:
        """What this process says of itself. ``begun``: see ``Sign``."""
        return Sign(self.stuck(), bool(self._now), bool(self._waiting), begun)

    def stuck(self) -> Stuck | None:
        """The thread's current phase, if it makes no progress."""
        with self._lock:
            if not self._now or self._starting:
                return None
            phase = self._now[-1]
            usual, n = self._usual.get(phase.name, (0.0, 0))
            if phase.name in self._hidden:
                usual = sum(seconds for seconds, _ in self._usual.values())
        now, least = time.monotonic(), self._least.get(phase.name, self._shortest)
        if n >= _KNOWN and phase.name not in OPEN:
            since, most = phase.marked, max(TIMES * usual, least)
            seconds = now - phase.began
        else:
            usual, most = 0.0, max(self._patience, least)
            if now - phase.alive > _QUIET and now - phase.marked < TIMES * most and not self._waiting:
                phase.alive = now if self._works(phase.thread) else phase.alive
            since = phase.alive
            seconds = now - since
        if now - since <= most:
            return None
        return Stuck(phase.name, seconds, usual, _place(phase.thread))


def _place(thread: int) -> str:
    """The innermost line that ``thread`` is in, and that of mmrl or of a drop-in file which has called it."""
    with rarely_collected():  # Python 3.11 holds a lock meanwhile for which a finaliser may wait for ever
        frames: dict[int, FrameType] = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame = frames.get(thread)
    inner = None if frame is None else _line(frame)
    while frame is not None and _of_library(frame.f_code.co_filename):
        frame = frame.f_back
    outer = None if frame is None else _line(frame)
    if inner is None or outer is None or inner == outer:
        return inner or ""
    return f"{inner}, called by {outer}"


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _of_library(path: str) -> bool:
    return "site-packages" in path or path.startswith((sys.base_prefix, "<"))
