"""The process that forks one for each episode of an isolated environment. Run as a script, with the end of a pipe.

``keeper.py FD`` imports the environment once. It takes pairs of the parent's: ``("fork", 0)`` with the end of another
pipe, answered by the number of the process that serves it; ``("end", pid)`` kills that process and what it started;
``("died", pid)`` does so too, and is answered by its status. When the parent is gone, all of them end. An episode's
process takes ``(method, arguments)`` and answers JSON, as a journal has it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from mmrl.config.environment import Environment as Section
from mmrl.core.episode import Observation
from mmrl.core.errors import UserError
from mmrl.core.plugins.user_code import describe
from mmrl.episodes.environment import Environment, told_of
from mmrl.episodes.isolated import MOST
from mmrl.episodes.journal import outcome
from mmrl.episodes.loading import about, close, maker
from mmrl.episodes.pool import returned_by

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the pipe is closed."""
    pipe: Connection = Connection(int(sys.argv[1]))
    sys.path[:], given = pipe.recv()
    section = Section.model_validate(given)
    try:
        make = maker(section)
    except Exception as error:  # of the user's file
        return pipe.send_bytes(describe(error).encode())
    pipe.send_bytes(b"")
    gc.collect()
    gc.freeze()  # else the first collection of each process copies all pages
    running: set[int] = set()
    try:
        while True:
            asked, pid = pipe.recv()
            if asked == "fork":
                running.add(_forked(pipe, make, int(section.memory)))
                continue
            running.remove(pid)
            status = _ended(pid, 1.0 if asked == "died" else 0.0)
            if asked == "died":
                pipe.send_bytes(str(status).encode())
    except (EOFError, OSError):
        for pid in running:
            _ended(pid, 0.0)


def _forked(pipe: Connection, make: Callable[[], Environment], memory: int) -> int:
    end = recv_handle(pipe)
    os.set_inheritable(end, False)
    pid = os.fork()
    if pid:
        os.close(end)
        with suppress(OSError):  # it has done so itself
            os.setpgid(pid, pid)
        pipe.send_bytes(str(pid).encode())
        return pid
    try:
        pipe.close()
        _bound(memory)
        _serve(Connection(end), make)
    finally:
        os._exit(0)


def _bound(memory: int) -> None:
    """Make this process end with the keeper, before others where memory is scarce, and without its random numbers."""
    os.setpgid(0, 0)
    if prctl := getattr(ctypes.CDLL(None), "prctl", None):  # Linux has it
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory if most < 0 else min(memory, most), most))
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()


def _serve(pipe: Connection, make: Callable[[], Environment]) -> None:
    world: Environment | None = None

    def call(method: str, arguments: tuple[Any, ...]) -> Any:
        nonlocal world
        if method == "close":
            return None if world is None else close(world)
        if method == "about":
            try:
                world = make()
                return Observation(info=about(world))
            except UserError as error:
                return Observation(info={"refused": str(error)})
        world = make() if world is None else world
        return getattr(world, method)(*arguments)

    with suppress(EOFError, OSError):
        while True:
            asked, arguments = pipe.recv()
            try:
                answer = json.dumps(outcome(*told_of(returned_by(partial(call, asked, arguments))))).encode()
            except MemoryError:
                answer = json.dumps(outcome((), "MemoryError")).encode()
            if len(answer) > MOST:
                why = f"it answered with {len(answer) >> 20} MiB; at most {MOST >> 20} are taken"
                answer = json.dumps(outcome((), why)).encode()
            pipe.send_bytes(answer)


def _ended(pid: int, patience: float) -> int:
    """Its status, after it and what it started were killed; ``patience``: seconds in which it may end by itself."""
    until = time.monotonic() + patience
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) and time.monotonic() < until:
        time.sleep(0.01)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
