"""Stop a run on a signal: the current step is finished and saved first."""

from __future__ import annotations

import errno
import os
import signal
import sys
import termios
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""The signals after which the process must end, with exit code 128 + number; Ctrl-C ends it with 0."""


@dataclass
class Stop:
    """Whether a stop was asked for; ``signal`` is the number of the signal that asked first, ``reason`` what a callback
    said."""

    asked: bool = False
    signal: int | None = None
    reason: str | None = None

    @property
    def why(self) -> str:
        """Why a stop was asked for, in a few words; empty where this process does not know."""
        if self.reason or self.signal is None:
            return self.reason or ""
        return "Ctrl-C" if self.signal == signal.SIGINT else signal.Signals(self.signal).name

    @property
    def exit_code(self) -> int:
        """The exit code of the process where the stop came before the end of training: as a shell shows a process that
        a signal ended."""
        return 0 if self.signal is None or self.signal not in ENDING else 128 + self.signal


_stops: list[Stop] = []
"""Of the runs that this process has open."""


def stop_asked() -> bool:
    """Whether a run of this process was asked to stop by a signal: what waits without end, in any thread, asks this."""
    return any(stop.asked for stop in _stops)


@contextmanager
def stop_on_signal() -> Generator[Stop]:
    """Ctrl-C, SIGTERM or SIGHUP asks for a stop after the step; a second Ctrl-C or SIGTERM interrupts at once.

    A terminal that closes sends SIGHUP, often twice; ``nohup`` has it ignored, and so it stays. In a thread other than
    the main one Python can handle no signals, so they stay as they are.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _: object) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        if stop.asked:
            if number == signal.SIGHUP:
                return
            raise KeyboardInterrupt
        stop.asked, stop.signal = True, number
        print("stopping after this step; once more to stop at once (the last checkpoint stays)", file=sys.stderr)

    heard = [s for s in (signal.SIGINT, *ENDING) if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, ask) for s in heard}
    _stops.append(stop)
    try:
        yield stop
    finally:
        _stops.remove(stop)
        for s, handler in before.items():
            signal.signal(s, handler)


def _leave_terminal() -> None:
    """Print nowhere from now on, where the terminal is gone: each write to it would fail."""
    for stream in (0, 1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, stream)
                os.close(nowhere)
