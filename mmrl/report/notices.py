"""Print a run's messages immediately, from any of its processes, and announce restarts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from mmrl.secrets import hidden


class Pulse(Protocol):
    """Learns from any thread that this process works."""

    def starting(self) -> AbstractContextManager[None]:
        """Entered while something is started that has a deadline of its own."""
        ...

    def alive(self) -> None:
        """A part of the work is finished."""
        ...


_tell: Callable[[str], object] | None = None
_pulse: Pulse | None = None


def listen(tell: Callable[[str], object] | None, pulse: Pulse | None = None) -> None:
    """Pass the lines that this process prints to ``tell``, from any thread, and its signs of life to ``pulse``. None
    ends that."""
    global _tell, _pulse
    _tell, _pulse = tell, pulse


def tell(line: str) -> None:
    """Print ``line`` on stderr, and pass it on (``listen``)."""
    line = hidden(line)
    print(line, file=sys.stderr, flush=True)
    if _tell is not None:
        _tell(line)


@contextmanager
def starting() -> Generator[None]:
    """Something is started, and that is no time of the phase that waits for it."""
    with nullcontext() if _pulse is None else _pulse.starting():
        yield


def alive() -> None:
    """A part of the work is finished: a process that says so now and then is not taken for one that hangs."""
    if _pulse is not None:
        _pulse.alive()
