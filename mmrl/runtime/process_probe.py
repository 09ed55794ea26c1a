"""Read the state of a process from outside: one that holds Python's lock (GIL) in a call cannot answer."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

_LOOK_S = 1.0
_ALONE = 0.02
"""The share of a core above which a thread computes that others may leave little of it."""
_MOVES = 2**18
"""Bytes a second above which a process reads or writes: those of its signs of life are fewer."""
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_COMPUTES = 0.1
"""The share of a core above which a process counts as computing. Threads that wait for the lock use far less."""


@dataclass(frozen=True)
class Reading:
    """``status`` in psutil's words, and the CPU seconds of the process so far; ``at``: when, in monotonic seconds."""

    status: str
    cpu_seconds: float
    at: float

    @property
    def stopped(self) -> bool:
        return self.status in STOPPED


def read(pid: int) -> Reading | None:
    """Read the process ``pid`` of this machine; None if it cannot be read."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return Reading(process.status(), times.user + times.system, time.monotonic())
    except psutil.Error:
        return None


class Silence:
    """Final class: the readings of a process since it stopped answering."""

    def __init__(self) -> None:
        self._first: Reading | None = None
        self._last: Reading | None = None
        self.reported = False

    def see(self, reading: Reading | None) -> None:
        """Add a reading; None is ignored."""
        self._last = reading or self._last
        self._first = self._first or reading

    @property
    def stopped(self) -> bool:
        return self._last is not None and self._last.stopped

    def __str__(self) -> str:
        if self._first is None or self._last is None:
            return "its state is not known"
        if self._last.stopped:
            return "it is stopped (SIGSTOP)"
        used, seconds = self._last.cpu_seconds - self._first.cpu_seconds, self._last.at - self._first.at
        what = "it computes" if used > _COMPUTES * seconds else f"it waits for something ({self._last.status})"
        return f"{what}: {used:.1f} s of CPU time in {seconds:.0f} s"


class Work:
    """Final class: whether this process does anything, as far as the system can tell: it computes (a process that it
    has started, too), reads or writes. A thread that waits does none of it.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def __call__(self, thread: int) -> bool:
        """Whether it worked since the last call, at least a second ago. ``thread``: the one that has to get on."""
        now = {"at": time.monotonic(), "process": time.process_time(), "children": 0.0, "moved": 0.0}
        if now["at"] - self._last.get("at", -_LOOK_S) < _LOOK_S:
            return False
        if hasattr(time, "pthread_getcpuclockid"):
            now["thread"] = time.clock_gettime(time.pthread_getcpuclockid(thread))
        with suppress(psutil.Error):
            own = psutil.Process()
            for times in [child.cpu_times() for child in own.children(recursive=True)]:
                now["children"] += times.user + times.system
            if hasattr(own, "io_counters"):
                moved = own.io_counters()
                now["moved"] = moved.read_chars + moved.write_chars + moved.read_bytes + moved.write_bytes
        before, self._last = self._last, now
        more = {name: value - before.get(name, value) for name, value in now.items()}
        computes = more["process"] + more["children"] > _COMPUTES * more["at"]
        return computes or more.get("thread", 0.0) > _ALONE * more["at"] or more["moved"] > _MOVES * more["at"]
