"""Environments in processes of their own: a call that hangs, dies or takes all memory ends its episode alone.

A keeper (``mmrl/episodes/keeper.py``) imports the environment once, and forks a process for each episode; functions,
which have no state, take any process that is free. What comes back is JSON, with the bytes of pictures.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from mmrl.config import environment
from mmrl.core.episode import Action
from mmrl.core.errors import UserError
from mmrl.core.script_process import ScriptProcess
from mmrl.core.trajectory import Prompt
from mmrl.episodes.environment import Environment
from mmrl.episodes.journal import outcome_of
from mmrl.episodes.pool import Returned

_SCRIPT = Path(__file__).with_name("keeper.py")

MOST = 256 << 20
"""Bytes of an answer: 16 pictures of 2048 x 2048."""


@dataclass(eq=False)
class _Process:
    pid: int
    pipe: Connection
    ended: bool = field(default=False, init=False)


class Isolated:
    """Final class. The processes of the environment that ``settings`` names. They end with it, with this process, and
    where it is killed."""

    stateless = False
    """Whether the environment is of functions alone."""

    def __init__(self, settings: environment.Environment) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._keeper: ScriptProcess | None = None
        self._free: list[_Process] = []

    def make(self) -> Apart:
        """An environment whose process is there with its first call. Raises ``UserError`` where the file cannot be
        imported there."""
        with self._lock:
            if self._keeper is None or self._keeper.process.poll() is not None:
                self._open()
        return Apart(self)

    def _open(self) -> None:
        self._free.clear()
        self._keeper = keeper = ScriptProcess(_SCRIPT, quiet=True, own_session=True)
        keeper.pipe.send((sys.path, self._settings.model_dump(mode="json")))
        try:
            why = keeper.pipe.recv_bytes().decode()
        except EOFError:
            why = f"its process ended {_words(keeper.process.wait())}"
        if why:
            self._keeper = None
            raise UserError(
                f"environment.isolate: {self._settings.name} cannot be imported in a process of its own: {why}; mend "
                "its file, or set environment.isolate to false"
            )

    def begun(self) -> _Process:
        """A process that is free, or another one. Raises ``OSError`` or ``EOFError``."""
        with self._lock:
            if self._free:
                return self._free.pop()
            assert self._keeper is not None
            ours, theirs = Pipe()
            with theirs:
                self._keeper.pipe.send(("fork", 0))
                send_handle(self._keeper.pipe, theirs.fileno(), None)
            return _Process(int(self._keeper.pipe.recv_bytes()), ours)

    def free(self, process: _Process) -> None:
        """The process of a function waits for another call."""
        with self._lock:
            if not process.ended:
                self._free.append(process)

    def end(self, process: _Process) -> None:
        """Kill it, and what it started."""
        with self._lock:
            if not process.ended and self._keeper is not None:
                process.ended = True
                with suppress(OSError):  # a keeper that ended took all with it
                    self._keeper.pipe.send(("end", process.pid))

    def died(self, process: _Process) -> str:
        """How a process ended that does not answer any more."""
        with self._lock:
            if process.ended or self._keeper is None:
                return "as it was told"
            process.ended = True
            try:
                self._keeper.pipe.send(("died", process.pid))
                return _words(int(self._keeper.pipe.recv_bytes()))
            except (EOFError, OSError):
                return "with the one that started it"


class Apart:
    """Final class, an ``Environment`` whose calls are made in a process of ``of``; they wait until ``end``, and return
    what is told as a ``Returned``."""

    def __init__(self, of: Isolated) -> None:
        self._of, self._process, self._calling = of, None, False
        self._process: _Process | None

    def reset(self, prompt: Prompt, seed: int) -> Any:
        return None if self._of.stateless else self._called("reset", prompt, seed)

    def step(self, action: Action) -> Any:
        return self._called("step", action)

    def about(self) -> Returned:
        """What is to be known before episodes begin, in the ``info`` of an observation (``loading.about``)."""
        return self._called("about")

    def close(self) -> Returned | None:
        """Close the environment, unless its process is gone, or within a call."""
        if self._process is None or self._process.ended or self._calling:
            return None
        return self._called("close")

    def _called(self, method: str, *arguments: object) -> Returned:
        try:
            process = self._process = self._process or self._of.begun()
        except (EOFError, OSError) as error:
            return Returned((), f"no process can be started for it: {error}")
        self._calling = True
        try:
            process.pipe.send((method, arguments))
            kept = outcome_of(json.loads(process.pipe.recv_bytes(MOST)))
        except (EOFError, OSError, ValueError):
            return Returned((), f"its process ended {self._of.died(process)}")
        finally:
            self._calling = False
        if self._of.stateless:
            self._process = None
            self._of.free(process)
        where = " (environment.memory)" if kept.failure.startswith("MemoryError") else ""
        return Returned(kept.told, kept.failure + where)

    def end(self) -> None:
        """The episode is over: kill its process, also within a call."""
        process, self._process = self._process, None
        if process is not None:
            self._of.end(process)


def end(world: Environment) -> None:
    """The episode of ``world`` is over: its process, where it has one, ends."""
    if isinstance(world, Apart):
        world.end()


def _words(status: int) -> str:
    if status >= 0:
        return f"with status {status}"
    return f"by {signal.Signals(-status).name}"
