"""A test that hangs prints where each thread stands, ends its process and fails by name. Nothing else waits for it.

``pytest-timeout``'s own thread needs Python's lock, which a call in C may hold for ever, and what it prints in a
process of ``pytest-xdist`` is seen by nobody. The pytest that started such a process reads from their pipe until all
that have it have closed it, and so waited for ever for a process that a test had forked, where that hung, too.
"""

import faulthandler
import os
import stat
from contextlib import suppress

import pytest


class Watch:
    """A plugin of pytest."""

    def __init__(self, distributed: bool) -> None:
        self.terminal = os.dup(2)  # later tests' output goes elsewhere
        if distributed:
            pipes = [fd for fd in range(3, 64) if is_pipe(fd)]
            os.register_at_fork(after_in_child=lambda: close(pipes))

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, settings) -> bool:
        faulthandler.dump_traceback_later(settings.timeout, exit=True, file=self.terminal)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self) -> bool:
        faulthandler.cancel_dump_traceback_later()
        return True


def is_pipe(fd: int) -> bool:
    with suppress(OSError):
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    return False


def close(pipes: list[int]) -> None:
    for fd in pipes:
        with suppress(OSError):
            os.close(fd)
