"""A controller, or one of its other devices, as a Ray actor."""

from __future__ import annotations

import atexit
import os
import platform
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mmrl.app.build import build
from mmrl.app.trainer import Outcome, Session
from mmrl.checkpoint.run_state import saver_of
from mmrl.config.loader import LoadedRecipe
from mmrl.config.replicas import leaders
from mmrl.controller.peers import begun
from mmrl.controller.preflight import UnreachedError
from mmrl.core import notices
from mmrl.core.errors import UserError
from mmrl.core.quiet import be_quiet, warn_plainly
from mmrl.core.secrets import remember
from mmrl.core.signals import Stop
from mmrl.families.text.pipeline import keep_episodes
from mmrl.inference import server_devices
from mmrl.inference.server_devices import ServerDevices
from mmrl.logging.rundir import RunDir
from mmrl.placement.multi_device import MultiDevice
from mmrl.runtime.program import Meeting, join, log_to, train_part, versions, watchdog
from mmrl.runtime.shipped import Bundle, moved, removed
from mmrl.runtime.stall_watchdog import BETWEEN, Sign, StallWatchdog
from mmrl.runtime.worker import RemoteWorker, WorkerListener, call, serve

NO_VARIABLES: Mapping[str, str] = {}
_SEEN = 5.0
"""Seconds for a file written on one node to become visible on the others."""


class Beat(NamedTuple):
    """A sign of life of the process ``pid`` on Ray's ``node``, with the log lines since the last one."""

    sign: Sign
    lines: list[str]
    node: str
    pid: int


class Actor:
    """Final class, in a separate process: device ``device`` of controller ``rank``; device 0 is the controller itself.

    ``train`` or ``serve`` runs in one thread, while other threads answer.
    """

    def __init__(self, rank: int, device: int, folder: str, variables: Mapping[str, str] = NO_VARIABLES) -> None:
        os.environ.update(variables)
        be_quiet()
        warn_plainly()
        remember(variables)
        with suppress(OSError):  # ``describe`` reports a node that lacks it
            os.chdir(folder)
        self._rank, self._device = rank, device
        self._stop = Stop()
        self._socket: socket.socket | None = None
        self._listener: WorkerListener | None = None
        self._pulse: StallWatchdog | None = None
        self._session: Session | None = None
        self._lines: deque[str] = deque()
        self._given: Bundle | None = None

    def listen(self) -> tuple[str, int]:
        """The address for the other controllers: on the loopback if Ray runs there."""
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        host = ray.util.get_node_ip_address()
        self._socket = socket.create_server((host, 0))
        return host, self._socket.getsockname()[1]

    def receive(self) -> tuple[str, bytes]:
        """The address on this host for the controller's other devices, and the key that they need."""
        self._listener = WorkerListener()
        return self._listener.address, self._listener.key

    def describe(self, mark: str) -> dict[str, str]:
        """This node's ``name``, its ``versions``, and whether it ``sees`` the file ``mark`` of the run's directory."""
        until = time.monotonic() + _SEEN
        while not (seen := Path(mark).exists()) and time.monotonic() < until:
            time.sleep(0.2)
        return {"name": platform.node(), "versions": versions(), "sees": "yes" if seen else ""}

    def lacks(self, paths: Sequence[str]) -> tuple[str, list[str]]:
        """This node's name, and those of ``paths`` that it does not see."""
        return platform.node(), [path for path in paths if not Path(path).exists()]

    def visible(self) -> str:
        """The GPU of this process, as in ``CUDA_VISIBLE_DEVICES``; empty on a CPU."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def start_servers_on(self, devices: ServerDevices) -> None:
        """Start engines and judges that are servers on ``devices``."""
        server_devices.settle(devices)

    def take(self, given: Bundle) -> None:
        """Take the recipe's files, which this node does not see."""
        self._given = given

    def _with_files(self, loaded: LoadedRecipe) -> LoadedRecipe:
        if self._given is None:
            return loaded
        loaded = moved(loaded, self._given)
        atexit.register(removed, loaded)
        return loaded

    def beat(self) -> Beat:
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        node = ray.get_runtime_context().get_node_id()
        return Beat(self._pulse.sign(begun()) if self._pulse else Sign(), lines, node, os.getpid())

    def tell(self, line: str) -> None:
        """Send ``line``, which is already in this process's log, to the launcher."""
        self._lines.append(line)

    def settle(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._session is not None:
            self._session.saver.wait()

    def stop(self) -> None:
        """Stop after the step."""
        self._stop.asked = True

    def leave(self) -> None:
        """End this process; used when the cluster is lost and Ray cannot end it."""
        os._exit(1)

    def train(self, loaded: LoadedRecipe, path: str, host: str, port: int, *, resume: bool) -> Outcome:
        """Train this controller's part; what it prints goes into ``controllers/RANK.log`` of the run."""
        whole, loaded = RunDir(path), self._with_files(loaded)
        log_to(whole.path / "controllers" / f"{self._rank}.log", keep=resume)
        self._pulse = watchdog(loaded.recipe)
        notices.listen(self.tell, self._pulse)
        meeting = Meeting(host, port, self._socket)
        with self._pulse(BETWEEN):
            try:
                controller = join(loaded.recipe, self._rank, 0, meeting, self._pulse.waiting)
            except UnreachedError as error:
                return Outcome(False, 0, 0, 0.0, str(error))
            devices = self._devices(loaded)
            return train_part(loaded, whole, controller, devices, self._pulse, self._stop, self._begun, resume=resume)

    def _begun(self, session: Session) -> None:
        self._session = session

    def serve(
        self, loaded: LoadedRecipe, path: str, host: str, port: int, address: str, key: bytes, *, resume: bool
    ) -> Outcome | None:
        """Run the tasks of the controller at ``address``; output goes into ``controllers/RANK.DEVICE.log``.

        Returns the error that the user must fix, if this device cannot start.
        """
        whole, loaded = RunDir(path), self._with_files(loaded)
        log_to(whole.path / "controllers" / f"{self._rank}.{self._device}.log", keep=resume)
        try:
            controller = join(loaded.recipe, self._rank, self._device, Meeting(host, port))
        except UnreachedError as error:
            return Outcome(False, 0, 0, 0.0, str(error))
        connection = call(self._device, address, key)
        self._pulse = watchdog(loaded.recipe)
        try:
            with self._pulse("load"):
                run = build(loaded.recipe, controller)
        except UserError as error:  # the controller reports the same error, or that this device is missing
            return Outcome(False, 0, 0, 0.0, str(error))
        run.rewards.folder = whole.of_controller(self._rank).path
        keep_episodes(run.pipeline, run.rewards.folder)
        serve(run, connection, saver_of(run, whole.checkpoints), self._pulse)

    def _devices(self, loaded: LoadedRecipe) -> MultiDevice | None:
        """The controller's devices, after the others have connected; None if it has only one."""
        if self._listener is None:
            return None
        connections = self._listener.accept(loaded.recipe.devices_per_controller - 1)
        workers = [RemoteWorker(n, one, notices.tell, notices.starting) for n, one in enumerate(connections, 1)]
        return MultiDevice(workers, loaded.recipe.placement, notices.starting, leaders(loaded.recipe))
