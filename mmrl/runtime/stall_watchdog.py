"""Track the progress of a controller: its current phase, the phase's start and usual duration."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

TIMES = 10
"""A phase that takes this many times its usual time counts as stuck."""
_KNOWN = 3
"""Number of completed phases after which the usual time is known."""
_RECENT = 0.3


@dataclass(frozen=True)
class Stuck:
    """A phase that takes too long; times in seconds. ``waits``: it waits for other controllers, to be checked first."""

    phase: str
    seconds: float
    usual: float
    waits: bool


class StallWatchdog:
    """Final class. One thread runs phases, and a second thread checks it.

    ``least``: seconds by phase before which it does not count as stuck; ``patience`` for all other phases. ``hidden``:
    phases that overlap with others and usually take no time: their usual time is that of all phases together.
    """

    def __init__(self, patience: float, least: Mapping[str, float] | None = None, hidden: Collection[str] = ()) -> None:
        self._patience, self._least, self._hidden = patience, dict(least or {}), hidden
        self._usual: dict[str, tuple[float, int]] = {}
        self._now: list[tuple[str, float]] = []
        self._waiting = self._starting = 0
        self._began_starting = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        """Mark the thread as in ``phase`` inside the block."""
        with self._lock:
            self._now.append((phase, time.monotonic()))
        try:
            yield
        finally:
            with self._lock:
                _, began = self._now.pop()
                before, n = self._usual.get(phase, (0.0, 0))
                took = time.monotonic() - began
                self._usual[phase] = (before + (took - before) * max(_RECENT, 1 / (n + 1)), n + 1)

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Mark the thread as waiting for other controllers inside the block."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    @contextmanager
    def starting(self) -> Generator[None]:
        """Pause the phase's time while something starts, in any thread, that has its own deadline."""
        with self._lock:
            self._starting += 1
            if self._starting == 1:
                self._began_starting = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._starting -= 1
                if not self._starting:
                    now = time.monotonic()
                    self._now = [(p, b + now - max(b, self._began_starting)) for p, b in self._now]

    def stuck(self) -> Stuck | None:
        """The thread's current phase, if it takes too long."""
        with self._lock:
            if not self._now or self._starting:
                return None
            phase, began = self._now[-1]
            usual, n = self._usual.get(phase, (0.0, 0))
            if phase in self._hidden:
                usual = sum(seconds for seconds, _ in self._usual.values())
        seconds = time.monotonic() - began
        if n < _KNOWN or seconds <= max(TIMES * usual, self._least.get(phase, self._patience)):
            return None
        return Stuck(phase, seconds, usual, bool(self._waiting))
