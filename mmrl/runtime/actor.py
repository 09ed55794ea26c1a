"""One process of a run as a Ray actor."""

from __future__ import annotations

import atexit
import os
import pickle
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from mmrl.app.trainer import Outcome
from mmrl.config.loader import LoadedRecipe
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.plugins.user_code import describe
from mmrl.core.quiet import be_quiet, warn_plainly
from mmrl.core.secrets import remember
from mmrl.core.signals import Stop
from mmrl.logging.rundir import RunDir
from mmrl.runtime.heartbeat import Processes, whereabouts
from mmrl.runtime.launchers import Launched
from mmrl.runtime.process import RunProcess
from mmrl.runtime.program import log_to, sees, versions
from mmrl.runtime.rendezvous import meet
from mmrl.runtime.shipped import Bundle, moved, removed
from mmrl.training.callbacks import AnyCallback


def packed(callbacks: Sequence[AnyCallback], dumps: Callable[[object], bytes]) -> bytes:
    """``callbacks`` for another process; ``dumps`` packs functions with what they hold (``ray.cloudpickle``). Raises
    ``UserError`` for one that holds what cannot leave this one."""
    for one in callbacks:
        try:
            dumps(one)
        except Exception as error:  # whatever an object of the user's raises
            name = getattr(one, "__qualname__", type(one).__qualname__)
            raise UserError(
                f"callbacks: {name} cannot be copied to the process that leads the run ({describe(error)}); open files "
                "and connections in its first call, or set controllers=1 devices_per_controller=1"
            ) from error
    return dumps(list(callbacks)) if callbacks else b""


def unpacked(callbacks: bytes) -> Sequence[AnyCallback]:
    """What ``packed`` packed. Raises ``UserError`` where this process lacks a module."""
    try:
        return pickle.loads(callbacks) if callbacks else ()
    except Exception as error:
        raise UserError(
            f"callbacks: the process that leads the run cannot load them ({describe(error)}); put their modules where "
            "its host finds them, or define them in the script that calls mmrl.train"
        ) from error


class Actor:
    """Final class, in a separate process: number ``number`` of the run. ``run`` runs in one thread, while other threads
    answer."""

    def __init__(self, number: int, folder: str, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)
        be_quiet()
        warn_plainly()
        remember(variables)
        with suppress(OSError):  # ``describe`` reports a node that lacks it
            os.chdir(folder)
        self._number = number
        self._stop = Stop()
        self._socket: socket.socket | None = None
        self._process: RunProcess | None = None
        self._left: SimpleQueue[Outcome] = SimpleQueue()
        self._given: Bundle | None = None

    def listen(self) -> tuple[str, int]:
        """The address for the other processes: on the loopback if Ray runs there."""
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        host = ray.util.get_node_ip_address()
        self._socket = socket.create_server((host, 0))
        return host, self._socket.getsockname()[1]

    def describe(self, mark: str) -> dict[str, str]:
        """This node's ``name``, its ``versions``, and whether it ``sees`` the file ``mark`` of the run's directory."""
        return {"name": platform.node(), "versions": versions(), "sees": "yes" if sees(mark) else ""}

    def lacks(self, paths: Sequence[str]) -> tuple[str, list[str]]:
        """This node's name, and those of ``paths`` that it does not see."""
        return platform.node(), [path for path in paths if not Path(path).exists()]

    def whereabouts(self) -> JsonObject:
        """This process, for the others."""
        return whereabouts()

    def take(self, given: Bundle) -> None:
        """Take the recipe's files, which this node does not see."""
        self._given = given

    def run(
        self,
        loaded: LoadedRecipe,
        path: str,
        processes: Processes,
        host: str,
        port: int,
        *,
        resume: bool,
        callbacks: bytes = b"",
    ) -> Outcome:
        """Do this process's part of the run in ``path``; what it prints goes into ``controllers/`` there.
        ``callbacks``: ``packed``, for it to call."""
        if self._given is not None:
            loaded = moved(loaded, self._given)
            atexit.register(removed, loaded)
        whole = RunDir(path)
        logs = whole.path / "controllers"
        log_to(logs / processes.log(self._number), keep=resume)

        def show(line: str) -> None:
            with (logs / processes.log(0)).open("a") as leading:  # the driver prints what is new in it
                leading.write(f"{line}\n")

        found = Launched("ray", self._number, len(processes.where), 0, host, port)
        try:
            called = unpacked(callbacks)
            store = meet(found, loaded.recipe.runtime.patience, self._socket)
        except UserError as error:
            return Outcome(False, 0, 0, 0.0, str(error))
        self._process = RunProcess(loaded, whole, found, store, processes, self._left.put, called, show)
        return self._process.run(self._stop, resume=resume)

    def left(self) -> Outcome:
        """How the run ends, if this process waits in vain for one that is lost."""
        return self._left.get()

    def settle(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._process is not None:
            self._process.settle()

    def stop(self) -> None:
        """Stop after the step."""
        self._stop.asked = True

    def leave(self) -> None:
        """End this process; used when the cluster is lost and Ray cannot end it."""
        os._exit(1)
