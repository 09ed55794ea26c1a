"""Print a run's messages immediately, from any of its processes, and announce restarts."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from mmrl.secrets import hidden


class Listener(Protocol):
    """Receives notices of this process. Called from any thread."""

    def tell(self, line: str) -> None:
        """Pass on what was printed."""
        ...

    def starting(self) -> AbstractContextManager[None]:
        """Entered while something is started that has a deadline of its own."""
        ...

    def alive(self) -> None:
        """A part of the work is finished."""
        ...


_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Set the ``listener`` of this process's notices; None removes it."""
    global _listener
    _listener = listener


def tell(line: str) -> None:
    """Print ``line`` on stderr, and pass it to the listener."""
    line = hidden(line)
    print(line, file=sys.stderr, flush=True)
    if _listener is not None:
        _listener.tell(line)


@contextmanager
def starting() -> Generator[None]:
    """Something is started, and that is no time of the phase that waits for it."""
    with nullcontext() if _listener is None else _listener.starting():
        yield


def alive() -> None:
    """A part of the work is finished: a process that says so now and then is not taken for one that hangs."""
    if _listener is not None:
        _listener.alive()
