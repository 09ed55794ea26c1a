"""Check every second, in a thread, whether a server that mmrl started is alive.

A process that is stopped (``SIGSTOP``) keeps its sockets, and whoever waits for its answer waits on: so it is ended.
What a server is slow at is not looked at; the phase that waits for it has a usual time
(``mmrl.runtime.stall_watchdog``).
"""

from __future__ import annotations

import time
import weakref
from itertools import count
from threading import Thread
from typing import Protocol

import psutil

LOOK_S = 1.0
_MEMBERS = 5
"""Looks after which it is asked anew which processes there are: that reads those of the whole machine."""


class Watched(Protocol):
    """A server's process and those that it started: ``up`` once it was ready, ``closed`` once it is not needed."""

    up: bool
    closed: bool

    def ended(self) -> bool: ...

    def members(self) -> list[psutil.Process]: ...

    def lose(self, why: str = "") -> object:
        """End the server at once because of ``why`` (empty: it has ended by itself)."""
        ...


def watch_server(process: Watched) -> None:
    """Call ``process.lose`` once it has ended after it was up, or one of its processes is seen stopped twice."""
    Thread(target=_watch, args=(weakref.ref(process),), name="mmrl-vigil", daemon=True).start()


def _watch(there: weakref.ref[Watched]) -> None:
    members: list[psutil.Process] = []
    before: set[psutil.Process] = set()
    for look in count():
        time.sleep(LOOK_S)
        process = there()  # not held while we sleep: who drops it ends it
        if process is None or process.closed:
            return
        if process.ended():
            if process.up:  # else who waits for it says so
                process.lose()
            return
        members = members if look % _MEMBERS else process.members()
        stopped = {member for member in members if _stopped(member)}
        if both := stopped & before:
            named = ", ".join(f"its process {member.pid}" for member in both)
            process.lose(f"{named} was stopped (SIGSTOP), and has been ended")
            return
        before = stopped
        del process


def _stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
