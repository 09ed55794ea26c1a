"""Start Ray or connect to it, check whether its processes are alive, and end it."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import psutil
import torch

from mmrl.config.schema import Recipe
from mmrl.core.durations import duration
from mmrl.core.errors import UserError, plain
from mmrl.core.installing import install
from mmrl.core.notices import note
from mmrl.runtime.process_probe import STOPPED

START_S = 180.0
"""Seconds in which an actor must have started."""
_STORE = 100_000_000
"""Bytes of the object store of a cluster started here. Controllers store almost nothing in it, and Ray's default is a
share of all memory, in /dev/shm."""
_STARTS = 3  # Ray waits half a minute for its raylet, which is too short on a busy machine
_CORE = ("gcs_server", "raylet")
"""The processes that a cluster needs. A raylet ends when one of its agents ends."""
_AWAY = 6.0
"""Seconds for which the Ray processes of a cluster not started here may accept no connection."""
_LOOK = 0.9
_END = 5.0


class LostError(Exception):
    """A controller, or a device of one, is dead or frozen."""


class ClusterLostError(LostError):
    """One of Ray's own processes is gone, and the cluster with it."""


class Cluster:
    """A cluster that was not started here; this process depends on its ``services``. Final except for ``Local``."""

    local = False

    def __init__(self, ray: Any, services: Mapping[str, tuple[str, int]]) -> None:
        self.ray = ray
        self.lost = ""
        """How it was lost, else empty. Controllers may still answer then; Ray's services must not be called."""
        self._services = services
        self._looked = 0.0
        self._away: dict[str, float] = {}

    def check(self) -> None:
        """Raise ``ClusterLostError`` if one of Ray's processes is gone."""
        now = time.monotonic()
        if not self.lost and now - self._looked >= _LOOK:
            self._looked = now
            self.lost = self._fault()
        if self.lost:
            raise ClusterLostError(self.lost)

    def check_nodes(self) -> None:
        """Repeat ``check`` until the state is known: a GCS that is gone never answers."""
        self._looked = 0.0
        self.check()
        while self._away:
            time.sleep(_LOOK)
            self.check()

    def usable(self) -> bool:
        """Whether Ray's services answer."""
        with suppress(ClusterLostError):
            self.check_nodes()
        return not self.lost

    def _fault(self) -> str:
        for name, address in self._services.items():
            try:
                socket.create_connection(address, timeout=1).close()
                self._away.pop(name, None)
            except OSError as error:
                seconds = time.monotonic() - self._away.setdefault(name, time.monotonic())
                if seconds > _AWAY:
                    return f"ray: Ray's {name} at {address[0]}:{address[1]} is gone ({error}, for {seconds:.0f} s)"
        return ""

    def resources(self) -> tuple[dict[str, float], dict[str, float]]:
        """The free resources, and all resources."""
        return self.ray.available_resources(), self.ray.cluster_resources()

    def register(self, pid: int) -> None:
        """Register a controller's process."""

    def close(self) -> None:
        """Disconnect."""
        self.ray.shutdown()


class Local(Cluster):
    """Final class: a cluster that this process has started, whose processes ``own`` are its children."""

    local = True

    def __init__(self, ray: Any, own: Collection[psutil.Process]) -> None:
        self._own = set(own)
        self._core = {process: name for process in own if (name := _name(process)) in _CORE}
        self._stopped: set[psutil.Process] = set()
        super().__init__(ray, {})

    def check_nodes(self) -> None:
        super().check_nodes()
        if not any(node["Alive"] for node in self.ray.nodes()):  # and its raylet is about to end
            self.lost = "ray: Ray's raylet on this machine has ended"
            raise ClusterLostError(self.lost)

    def _fault(self) -> str:
        stopped = set()
        for process, name in self._core.items():
            status = _status(process)
            if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return f"ray: Ray's {name} on this machine (process {process.pid}) was killed or has ended"
            if status in STOPPED:
                stopped.add(process)
                if process in self._stopped:
                    return f"ray: Ray's {name} on this machine (process {process.pid}) is stopped (SIGSTOP)"
        self._stopped = stopped
        return ""

    def register(self, pid: int) -> None:
        """Register a controller's process, which would stay alive if the raylet is lost."""
        with suppress(psutil.Error):
            self._own.add(psutil.Process(pid))

    def close(self) -> None:
        """End the cluster. A lost cluster cannot end its processes itself."""
        if self.lost:
            _kill(self._own)
        self.ray.shutdown()


def _services(ray: Any) -> dict[str, tuple[str, int]]:
    """The addresses of the cluster's GCS and of this node's raylet. Ray's client (``ray://``) knows neither."""
    if ray.util.client.ray.is_connected():
        return {}
    here = ray.get_runtime_context()
    host, _, port = here.gcs_address.rpartition(":")
    found = {"GCS": (host.strip("[]"), int(port))}
    for node in ray.nodes():
        if node["NodeID"] == here.get_node_id():
            found["raylet"] = node["NodeManagerAddress"], node["NodeManagerPort"]
    return found


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""


def _status(process: psutil.Process) -> str:
    try:
        return process.status() if process.is_running() else psutil.STATUS_DEAD
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def _kill(processes: Collection[psutil.Process]) -> None:
    """End ``processes`` and their children."""
    every = set(processes)
    for process in processes:
        with suppress(psutil.Error):
            every |= set(process.children())
    for process in every:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(every, timeout=_END)


@contextmanager
def cluster(recipe: Recipe) -> Generator[Cluster]:
    """Start Ray or connect to it. Raises ``UserError`` if it is not installed, not reachable or too small."""
    ray = _imported(recipe)
    there = _connected(ray, recipe)
    try:
        _check_room(there, recipe)
        yield there
    finally:
        there.close()


def _check_room(there: Cluster, recipe: Recipe) -> None:
    """Wait until the cluster has as many free devices as the run needs, at most ``runtime.patience``. Raises
    ``UserError``."""
    kind, devices = "GPU" if on_gpu(recipe.device) else "CPU", recipe.controllers * recipe.devices_per_controller
    need = f"controllers: {recipe.controllers} of {recipe.devices_per_controller} devices need {devices} {kind}s"
    edit = "lower controllers or devices_per_controller, or add nodes"
    until, told = time.monotonic() + recipe.runtime.patience, False
    while True:
        free, has = (resources.get(kind, 0) for resources in there.resources())
        if has < devices:
            raise UserError(f"{need}, and Ray has {has:g}; {edit}")
        if there.local or free >= devices:
            return
        waiting = f"{need}, and {free:g} of Ray's {has:g} are free"
        if time.monotonic() > until:
            patience = duration(recipe.runtime.patience)
            raise UserError(f"{waiting} after {patience} (runtime.patience); wait for the other jobs there, {edit}")
        if not told:
            note(f"{waiting}: waiting for them")
        told = True
        time.sleep(1)


def _imported(recipe: Recipe) -> Any:
    if recipe.train.backend == "megatron" and not find_spec("megatron"):
        raise UserError(f"train.backend: Megatron-Core is not installed: {install('megatron')}, or set it to fsdp")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # for a cluster started here; 15 would starve controllers
    if recipe.ray == "local":  # read when Ray is imported: nodes on the loopback alone, as on macOS and Windows
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        if not hasattr(ray, "init"):
            raise ImportError("a folder named ray is found in place of Ray")
    except ImportError as error:
        n, each = recipe.controllers, recipe.devices_per_controller
        asked = f"{n} controller{'s' * (n > 1)}" + f" x {each} devices" * (each > 1)
        raise UserError(
            f"controllers: {asked} are processes of Ray, which is not installed: {install('ray')}, or set "
            "controllers and devices_per_controller to 1"
        ) from error
    return ray


def _connected(ray: Any, recipe: Recipe) -> Cluster:
    """Raises ``UserError`` if Ray does not start or is not reachable."""
    where: dict[str, Any] = {"address": recipe.ray}
    local = recipe.ray == "local"
    if local:
        cpus = max(recipe.controllers * recipe.devices_per_controller, os.cpu_count() or 1)  # more share the cores
        where |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": _STORE}
    before = set(psutil.Process().children())
    for attempt in range(1, _STARTS + 1):
        try:
            with _signals_kept():
                _answers(recipe.ray)
                ray.init(log_to_driver=False, logging_level="error", **where)
            break
        except Exception as error:  # Ray raises bare ones too
            _undo(ray, before)
            if not local or attempt == _STARTS or "timed out during startup" not in str(error):
                raise UserError(_why(error, recipe.ray)) from error
            print(f"Ray did not start in time; it is started again ({attempt + 1} of {_STARTS})", file=sys.stderr)
        except BaseException:
            _undo(ray, before)
            raise
    return Local(ray, set(psutil.Process().children()) - before) if local else Cluster(ray, _services(ray))


def _undo(ray: Any, before: set[psutil.Process]) -> None:
    """End the processes of a failed start."""
    _kill(set(psutil.Process().children()) - before)
    with suppress(Exception):
        ray.shutdown()


@contextmanager
def _signals_kept() -> Generator[None]:
    """Keep this process's signal handlers: Ray replaces that of SIGTERM and would end everything at once."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _why(error: Exception, address: str) -> str:
    """The message to the user about a start that failed with ``error``."""
    reason = plain(" ".join(str(error).split()) or type(error).__name__, 600)
    if "ersion mismatch" in reason:
        return (
            f"ray: the cluster at {address!r} and this environment differ ({reason}); install the same Ray and "
            "Python on all nodes, or set ray=local"
        )
    if address != "local":
        return (
            f"ray: there is no usable Ray cluster at {address!r} ({reason}); correct the address, start one "
            "(ray start --head), set its token if it needs one (RAY_AUTH_TOKEN), or set ray=local"
        )
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    if isinstance(error, OSError) or re.search("No space left|AF_UNIX path|/dev/shm", reason):
        edit = f"free space in {folder} and in /dev/shm, or name a folder with a short path: RAY_TMPDIR=/path"
    else:
        edit = f"see Ray's logs in {folder}/ray/session_latest/logs, and try again when the machine is less busy"
    return f"ray: Ray did not start on this machine ({reason}); {edit}"


def _answers(address: str) -> None:
    """Raises ``OSError`` if nothing listens at ``host:port``: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=5).close()


def on_gpu(device: str) -> bool:
    """Whether a controller computes on a GPU."""
    return torch.cuda.is_available() if device == "auto" else device.startswith("cuda")


def reserve_host(there: Cluster, recipe: Recipe, workers: Sequence[int], gpus: int) -> Any:
    """Reserve a controller's devices on one host: ``workers`` says how many each of its workers has. Raises
    ``UserError`` if no host has so many free."""
    ray, devices = there.ray, sum(workers)
    rooms = [{"CPU": 1, "GPU": n} if gpus else {"CPU": n} for n in workers]
    group = ray.util.placement_group(rooms, strategy="STRICT_PACK")
    until = time.monotonic() + max(START_S, recipe.runtime.patience)
    while not group.wait(1):
        there.check()
        if time.monotonic() > until:
            raise UserError(
                f"devices_per_controller: no host of the cluster has {devices} devices free for a controller; lower "
                "it, or add a larger host"
            )
    return group


def scheduling_in(group: Any, worker: int) -> Any:
    """Where to start an actor: in the room of ``worker`` in the reservation of its controller, or on the host with the
    most free resources."""
    if group is None:
        return "SPREAD"
    from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]  # an extra
        PlacementGroupSchedulingStrategy,
    )

    return PlacementGroupSchedulingStrategy(group, worker)
