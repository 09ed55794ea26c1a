"""What a process of a run says while it works: its messages, printed at once, its phases, and its signs of life."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from mmrl.core.secrets import hidden

_RECENT = 0.3
"""The least weight of the latest time in the usual one."""


@dataclass
class Phase:
    """``alive``: when it last showed progress, ``marked``: by a part of its work that was finished; the ``thread``'s
    identity."""

    name: str
    began: float
    marked: float
    alive: float
    thread: int


class Pulse:
    """The phases of a process, how long they usually take, and its signs of life."""

    def __init__(self) -> None:
        self._usual: dict[str, tuple[float, int]] = {}
        self._now: list[Phase] = []
        self._waiting = self._starting = 0
        self._began_starting = 0.0
        self._lock = threading.Lock()
        self.on_starting: Callable[[str], object] = str
        """``starting`` when something begins to start, ``started`` when nothing starts any more."""

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        """Mark the thread as in ``phase`` inside the block."""
        now = time.monotonic()
        with self._lock:
            self._now.append(Phase(phase, now, now, now, threading.get_ident()))
        try:
            yield
        finally:
            with self._lock:
                began, now = self._now.pop().began, time.monotonic()
                before, n = self._usual.get(phase, (0.0, 0))
                self._usual[phase] = (before + (now - began - before) * max(_RECENT, 1 / (n + 1)), n + 1)
                self._mark(now)

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
                self.on_starting("starting")
        try:
            yield
        finally:
            with self._lock:
                self._starting -= 1
                if not self._starting:
                    self.on_starting("started")
                    now = time.monotonic()
                    for phase in self._now:
                        phase.began += now - max(phase.began, self._began_starting)
                        phase.marked = phase.alive = now

    def alive(self) -> None:
        """A part of the phase's work is finished; any thread may say so."""
        with self._lock:
            self._mark(time.monotonic())

    def _mark(self, now: float) -> None:
        for phase in self._now[-1:]:
            phase.marked = phase.alive = now


_tell: Callable[[str], object] | None = None
_silent = 0
"""How many blocks are quiet now."""
_pulse: Pulse | None = None


def listen(tell: Callable[[str], object] | None, pulse: Pulse | None = None) -> None:
    """Pass the lines that this process prints to ``tell``, from any thread, and its signs of life to ``pulse``. None
    ends that."""
    global _tell, _pulse
    _tell, _pulse = tell, pulse


@contextmanager
def silenced(*, quiet: bool = True) -> Generator[None]:
    """Print warnings and errors alone inside the block: no notes and no progress. Without ``quiet`` all is printed."""
    global _silent
    _silent += quiet
    try:
        yield
    finally:
        _silent -= quiet


def silent(line: str = "") -> bool:
    """Whether ``line`` is not printed now (``silenced``); without one, whether notes are not."""
    return _silent > 0 and not line.startswith(("warning: ", "error: "))


def note(line: str) -> None:
    """Print ``line`` on stderr, unless this process is to be quiet."""
    if not silent(line):
        print(hidden(line), file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """``note``, of which other processes of the run hear (``listen``)."""
    line = hidden(line)
    note(line)
    if _tell is not None:
        _tell(line)


def starting() -> AbstractContextManager[None]:
    """Something is started inside, and that is no time of the phase that waits for it."""
    return nullcontext() if _pulse is None else _pulse.starting()


def alive() -> None:
    """A part of the work is finished: a process that says so now and then is not taken for one that hangs."""
    if _pulse is not None:
        _pulse.alive()
