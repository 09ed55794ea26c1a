"""Start the controllers of a run, watch them, and start them again from the last checkpoint where one is lost.

The launcher takes no part in a step. Controllers are Ray actors; each runs ``mmrl.session`` and writes where
``RunDir.of_controller`` says. The leader's log is shown as it grows.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmrl.config.loader import LoadedRecipe
from mmrl.errors import UnscoredError, UserError
from mmrl.manifest import entries
from mmrl.report.rundir import RunDir
from mmrl.runtime.actor import PATIENCE, Actor, versions
from mmrl.runtime.pulse import Stuck
from mmrl.session import Outcome, Stop

_START = 180.0
"""Seconds in which an actor must have started."""
_EVERY = 0.5
_GRACE = 5.0
"""Seconds to wait, where one controller failed because another is gone, for the other to be known as gone."""
_NODE_GONE = 15.0
"""Seconds after which a lost node is known as lost; a controller's end is known before that of its node."""
_RESTARTS = 3
"""Losses in a row, without a checkpoint between them, after which the run stops."""


Place = tuple[int, int]
"""A controller's rank, and which of its devices."""


class LostError(Exception):
    """A controller, or a device of one, is dead or frozen."""


def launch(loaded: LoadedRecipe, directory: RunDir, resume: bool, stop: Stop) -> Outcome:
    """Run the recipe's controllers to the end of training, or to a stop. Raises ``UserError``."""
    lost, saved = 0, _saved(directory)
    with cluster(loaded) as ray:
        while True:
            try:
                return Watch(ray, loaded, directory, resume).run(stop)
            except LostError as error:
                lost, saved = (lost + 1, saved) if _saved(directory) == saved else (1, _saved(directory))
                if lost > _RESTARTS:
                    logs = directory.path / "controllers"
                    raise UserError(f"{error}, for the {lost}th time after step {saved}; see {logs}") from error
                loaded = loaded if loaded.recipe.ray == "local" else _that_fits(ray, loaded)
                print(f"{error}; all controllers start again after step {saved}", file=sys.stderr)
                resume = True


def _that_fits(ray: Any, loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe with as many controllers as the cluster still has room for: a node may be lost, and who runs a slot
    changes nothing in it. Raises ``UserError`` where there is room for none."""
    recipe, kind = loaded.recipe, "GPU" if on_gpu(loaded.recipe.device) else "CPU"
    until = time.monotonic() + _NODE_GONE
    while True:
        room = sum(
            int(node["Resources"].get(kind, 0)) // recipe.devices_per_controller
            for node in ray.nodes()
            if node["Alive"]
        )
        if room < recipe.controllers or time.monotonic() > until:
            break
        time.sleep(_EVERY)
    if room >= recipe.controllers:
        return loaded
    if not room:
        raise UserError(
            f"ray: the cluster has lost its nodes, and none is left with {recipe.devices_per_controller} {kind}s for a "
            "controller; start Ray again there, then resume"
        )
    print(f"a node is lost: {room} of {recipe.controllers} controllers go on", file=sys.stderr)
    return replace(loaded, recipe=recipe.model_copy(update={"controllers": room}))


def _saved(directory: RunDir) -> int:
    """The step of the newest checkpoint that can be used; 0 where there is none."""
    return max((entry.step for entry in entries(directory.checkpoints) if entry.usable), default=0)


@contextmanager
def cluster(loaded: LoadedRecipe) -> Iterator[Any]:
    """Ray, started here or connected to. Raises ``UserError`` where it is missing, away or too small."""
    recipe = loaded.recipe
    if recipe.train.backend == "megatron" and not find_spec("megatron"):
        raise UserError(
            "train.backend: Megatron-Core is not installed: pip install 'mmrl[megatron]', or set it to fsdp"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster started here; 15 would starve controllers
    local = recipe.ray == "local"
    if local:  # read when Ray is imported: nodes on the loopback alone, which it does by itself on macOS and Windows
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray  # pyright: ignore[reportMissingImports]  # an extra
        from ray import init  # pyright: ignore[reportMissingImports]  # a folder named ray is none
    except ImportError as error:
        raise UserError(
            f"controllers: {recipe.controllers} controllers are Ray actors: pip install 'mmrl[ray]', or controllers=1"
        ) from error
    where: dict[str, Any] = {"address": recipe.ray}
    if local:
        cpus = max(recipe.controllers * recipe.devices_per_controller, os.cpu_count() or 1)  # more share the cores
        where = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    try:
        _answers(recipe.ray)
        init(log_to_driver=False, logging_level="error", **where)
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        if "ersion mismatch" in reason:
            raise UserError(
                f"ray: the cluster at {recipe.ray!r} and this environment differ ({reason}); install the same Ray and "
                "Python on all nodes, or set ray=local"
            ) from error
        raise UserError(
            f"ray: there is no usable Ray cluster at {recipe.ray!r} ({reason}); correct the address, start one "
            "(ray start --head), give its token where it asks for one (RAY_AUTH_TOKEN), or set ray=local"
        ) from error
    try:
        kind, has = ("GPU" if on_gpu(recipe.device) else "CPU"), ray.cluster_resources()
        devices = recipe.controllers * recipe.devices_per_controller
        if has.get(kind, 0) < devices:
            raise UserError(
                f"controllers: {recipe.controllers} of {recipe.devices_per_controller} devices need {devices} {kind}s, "
                f"and Ray has {has.get(kind, 0):g}; lower controllers or devices_per_controller, or add nodes"
            )
        yield ray
    finally:
        ray.shutdown()


def _answers(address: str) -> None:
    """Raises ``OSError`` where nothing listens at ``host:port``: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=5).close()


def on_gpu(device: str) -> bool:
    """Whether a controller computes on a GPU."""
    import torch

    return torch.cuda.is_available() if device == "auto" else device.startswith("cuda")


def _one_host(ray: Any, devices: int, gpus: int) -> Any:
    """Room for a controller's devices, all on one host. Raises ``UserError`` where none has so many free."""
    group = ray.util.placement_group([{"CPU": 1, **({"GPU": 1} if gpus else {})}] * devices, strategy="STRICT_PACK")
    if not group.wait(_START):
        raise UserError(
            f"devices_per_controller: no host of the cluster has {devices} devices free for a controller; lower it, or "
            "add a larger host"
        )
    return group


def _inside(group: Any) -> Any:
    """Where to start an actor: in the room of its controller, or where there is most."""
    if group is None:
        return "SPREAD"
    from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]  # an extra
        PlacementGroupSchedulingStrategy,
    )

    return PlacementGroupSchedulingStrategy(group)


class Watch:
    """Final class: one start of all controllers, until they are through or one is lost."""

    def __init__(self, ray: Any, loaded: LoadedRecipe, directory: RunDir, resume: bool) -> None:
        recipe = loaded.recipe
        self.ray, self.directory, self.size = ray, directory, recipe.controllers
        gpus = 1 if on_gpu(recipe.device) else 0
        self.actors: dict[Place, Any] = {}
        devices = recipe.devices_per_controller
        self._rooms = [_one_host(ray, devices, gpus) for _ in range(self.size)] if devices > 1 else []
        for rank in range(self.size):
            place = _inside(self._rooms[rank] if self._rooms else None)
            made = ray.remote(Actor).options(
                num_cpus=1, num_gpus=gpus, max_concurrency=4, max_restarts=0, scheduling_strategy=place
            )
            for device in range(devices):
                self.actors[rank, device] = made.remote(rank, device, str(Path.cwd()))
        self._arguments = loaded, str(directory.path.absolute()), resume
        self._shown = 0
        self._beats: dict[Place, tuple[Any, float]] = {}
        self._stuck: dict[Place, Stuck | None] = {}

    def run(self, stop: Stop) -> Outcome:
        """Raises ``LostError``, and what a controller raised that the user cannot mend."""
        try:
            self._check_nodes()
            where = self.ray.get(self.actors[0, 0].listen.remote(), timeout=_START)
            running = {}
            receptions = {}
            for (rank, device), actor in self.actors.items():
                if (rank, 1) in self.actors and device == 0:
                    receptions[rank] = self.ray.get(actor.receive.remote(), timeout=_START)
                work = actor.train.remote if device == 0 else actor.serve.remote
                running[work(*self._arguments, *where, *(receptions[rank] if device else ()))] = rank, device
            return self._watch(running, stop)
        except self.ray.exceptions.GetTimeoutError as error:
            raise LostError(f"a controller has not started within {_START:.0f} s") from error
        finally:
            self._settle()
            for actor in self.actors.values():
                self.ray.kill(actor)
            for room in self._rooms:
                self.ray.util.remove_placement_group(room)
            self._show()

    def _check_nodes(self) -> None:
        """Raise ``UserError`` where a controller's node lacks the run's directory, or runs other versions."""
        mark = self.directory.path.absolute() / f".seen-{uuid.uuid4().hex}"
        mark.touch()
        leading = [self.actors[rank, 0] for rank in range(self.size)]
        try:
            nodes = self.ray.get([actor.describe.remote(str(mark)) for actor in leading], timeout=_START)
        except self.ray.exceptions.RayActorError as error:
            why = " ".join(str(error).split()[-60:])
            raise UserError(
                f"controllers: one could not start on its node ({why}); install the same mmrl on all nodes"
            ) from error
        finally:
            mark.unlink()
        for rank, node in enumerate(nodes):
            where = f"node {node['name']!r} of controller {rank}"
            if node["versions"] != versions():
                raise UserError(
                    f"controllers: {where} has {node['versions']}, and this one {versions()}; install the same on all"
                )
            if not node["sees"]:
                raise UserError(
                    f"--out: {where} does not see {mark.parent}, where all controllers write and the leader saves; "
                    "name a directory that all nodes share"
                )

    def _watch(self, running: dict[Any, Place], stop: Stop) -> Outcome:
        outcomes: dict[int, Outcome] = {}
        told = False
        while len(outcomes) < self.size:
            done, _ = self.ray.wait(list(running), timeout=_EVERY)
            for ref in done:
                rank, device = running[ref]
                outcome = self._outcome(ref, running)
                if device == 0 or (outcome is not None and outcome.error):
                    outcomes[rank] = outcome
                del running[ref]
            failed = next((o for o in outcomes.values() if o.error), None)
            if failed:
                if failed.exit_code == UnscoredError.exit_code:  # all stop, and the leader saves
                    self.ray.wait(list(running), num_returns=len(running), timeout=_GRACE)
                self._settle()
                return replace(failed, finished=False, saved=_saved(self.directory))
            self._listen(running)
            self._show()
            if stop.asked and not told:
                told = True
                for rank in range(self.size):
                    self.actors[rank, 0].stop.remote()
        return outcomes[0]

    def _settle(self) -> None:
        """Have a checkpoint that the leader is writing on the disk, where it can."""
        with suppress(self.ray.exceptions.RayError):
            self.ray.get(self.actors[0, 0].settle.remote(), timeout=_GRACE)

    def _outcome(self, ref: Any, running: dict[Any, Place]) -> Outcome:
        """What a controller came to. Raises ``LostError`` where it, or another that it needed, is gone."""
        gone = self.ray.exceptions.RayActorError
        try:
            return self.ray.get(ref)
        except gone as error:
            raise self._lost(running[ref], error) from error
        except self.ray.exceptions.RayTaskError:
            others = [other for other in running if other is not ref]
            done, _ = self.ray.wait(others, num_returns=len(others), timeout=_GRACE) if others else ([], [])
            for other in done:
                try:
                    outcome = self.ray.get(other)
                except gone as cause:
                    raise self._lost(running[other], cause) from cause
                except self.ray.exceptions.RayTaskError:
                    continue
                if outcome is not None and outcome.error:
                    return outcome
            self._listen(running, wait=PATIENCE)
            raise

    def _lost(self, place: Place, error: Exception) -> LostError:
        return LostError(f"{self._name(place)} died ({str(error).strip().splitlines()[-1]})")

    def _name(self, place: Place) -> str:
        rank, device = place
        return f"{f'device {device} of ' if device else ''}controller {rank} of {self.size}"

    def _listen(self, running: dict[Any, Place], wait: float = 0.0) -> None:
        """Ask every controller for a sign of life. Raises ``LostError`` where one has given none for ``PATIENCE``."""
        until = time.monotonic() + wait
        while True:
            for place in running.values():
                ref, asked = self._beats.setdefault(place, (self.actors[place].beat.remote(), time.monotonic()))
                answered, _ = self.ray.wait([ref], timeout=0)
                if answered:
                    del self._beats[place]
                    with suppress(self.ray.exceptions.RayError):  # of the dead ``_outcome`` hears
                        self._stuck[place], told = self.ray.get(ref)
                        for line in told if place[0] else ():  # the leader's log is shown
                            print(f"{self._name(place)}: {line}", file=sys.stderr)
                elif (silent := time.monotonic() - asked) > PATIENCE:
                    raise LostError(f"{self._name(place)} is frozen: no sign of life for {silent:.0f} s")
            self._gets_on()
            if time.monotonic() >= until:
                return
            time.sleep(_EVERY)

    def _gets_on(self) -> None:
        """Raises ``LostError`` where a controller makes no progress and does not only wait for another, or all wait."""
        for place, stuck in self._stuck.items():
            if stuck is not None and not stuck.waits:
                raise LostError(
                    f"{self._name(place)} makes no progress: {stuck.phase} has taken {stuck.seconds:.0f} s, "
                    f"and usually takes {stuck.usual:.1f} s"
                )
        if sum(stuck is not None for stuck in self._stuck.values()) == self.size:
            raise LostError("all controllers wait for one another, far longer than usual")

    def _show(self) -> None:
        """Print what the leader's log has grown by."""
        try:
            with (self.directory.path / "controllers" / "0.log").open("rb") as file:
                file.seek(self._shown)
                new = file.read()
        except OSError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._shown += len(whole)
        sys.stderr.write(whole.decode(errors="replace"))
        sys.stderr.flush()
