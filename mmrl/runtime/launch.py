"""Start the controllers of a run, watch them, and restart them from the last checkpoint if one is lost.

The launcher does no work of a step. Controllers are Ray actors; each runs ``mmrl.app.trainer`` and writes into the
folder ``RunDir.of_controller``. The leader's log is printed as it grows.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmrl.app.trainer import Outcome
from mmrl.config.loader import LoadedRecipe
from mmrl.config.replicas import devices_of_workers, in_workers, leaders
from mmrl.config.schema import Recipe
from mmrl.core.checkpoint_manifest import entries
from mmrl.core.durations import duration
from mmrl.core.errors import UnscoredError, UserError
from mmrl.core.signals import Stop
from mmrl.inference.server_devices import ServerDevices
from mmrl.logging.rundir import RunDir
from mmrl.rewards.last_words import in_a_call
from mmrl.runtime.actor import Actor, Beat
from mmrl.runtime.cluster import (
    START_S,
    Cluster,
    ClusterLostError,
    LostError,
    cluster,
    on_gpu,
    reserve_host,
    scheduling_in,
)
from mmrl.runtime.process_probe import ProcessProbe, Silence
from mmrl.runtime.program import PATIENCE, versions
from mmrl.runtime.shipped import settings_and_secrets, ship, variables
from mmrl.runtime.stall_watchdog import Sign, no_progress

_EVERY = 0.5
_GRACE = 5.0
"""Seconds to wait for Ray to report a lost controller, after a different one has failed because of it."""
_LOOK = PATIENCE / 2
"""Seconds without an answer after which a process is inspected from outside."""
_NODE_GONE = 15.0
"""Seconds until Ray reports a lost node; it reports a controller's end before that of its node."""
_RESTARTS = 3
"""Losses in a row, without a checkpoint between them, after which the run stops."""

Place = tuple[int, int]
"""A controller's rank, and the number of its device."""


class Losses:
    """Final class: counts losses in a row without a new checkpoint between them."""

    def __init__(self, directory: RunDir) -> None:
        self._directory = directory
        self._lost, self._saved = 0, _saved(directory)

    def add(self, error: LostError) -> None:
        """Report that all controllers restart. Raises ``UserError`` after too many restarts without progress."""
        before, self._saved = self._saved, _saved(self._directory)
        self._lost = self._lost + 1 if self._saved == before else 1
        if self._lost > _RESTARTS:
            logs = self._directory.path / "controllers"
            raise UserError(f"{error}, for the {self._lost}th time after step {self._saved}; see {logs}") from error
        new = "a new cluster is started, and " if isinstance(error, ClusterLostError) else ""
        print(f"{error}; {new}all controllers start again after step {self._saved}", file=sys.stderr)


def launch(loaded: LoadedRecipe, directory: RunDir, stop: Stop, *, resume: bool) -> Outcome:
    """Run the recipe's controllers to the end of training, or to a stop. Raises ``UserError``."""
    losses = Losses(directory)
    outcome = None
    while outcome is None:
        with cluster(loaded.recipe) as there:
            outcome = _train(there, loaded, directory, resume, stop, losses)
        resume = True
    return outcome


def _train(
    there: Cluster, loaded: LoadedRecipe, directory: RunDir, resume: bool, stop: Stop, losses: Losses
) -> Outcome | None:
    """All starts of the controllers in one cluster. None if it was lost, and a new one can be started."""
    while True:
        try:
            return Watch(there, loaded, directory, resume=resume).run(stop)
        except LostError as error:
            if there.usable():
                losses.add(error)
            elif there.local:
                losses.add(ClusterLostError(there.lost))
                return None
            else:
                saved = _saved(directory)
                return Outcome(False, saved, saved, 0.0, f"{there.lost}; start Ray again there (ray start)")
            loaded = loaded if there.local else _recipe_that_fits(there.ray, loaded)
            resume = True


def _recipe_that_fits(ray: Any, loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe with as many controllers as the cluster still has room for: a node may be lost, and the results do not
    depend on which controller runs a slot. Raises ``UserError`` if there is no room for one."""
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
    print(f"a node is lost: {room} of {recipe.controllers} controllers continue", file=sys.stderr)
    return replace(loaded, recipe=recipe.model_copy(update={"controllers": room}))


def _saved(directory: RunDir) -> int:
    """The step of the newest usable checkpoint; 0 if there is none."""
    return max((entry.step for entry in entries(directory.checkpoints) if entry.usable), default=0)


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


class Watch:
    """Final class: one start of all controllers, until they finish or one is lost."""

    def __init__(self, there: Cluster, loaded: LoadedRecipe, directory: RunDir, *, resume: bool) -> None:
        given, ray = loaded.recipe, there.ray
        loaded = replace(loaded, recipe=in_workers(given))
        recipe, taken = loaded.recipe, devices_of_workers(given)
        self.cluster, self.ray, self.directory, self.size = there, ray, directory, recipe.controllers
        gpus = 1 if on_gpu(recipe.device) else 0
        self._kind, self._gpus = "GPU" if gpus else "CPU", gpus
        self.actors: dict[Place, Any] = {}
        workers = recipe.devices_per_controller
        self._rooms = [reserve_host(there, recipe, taken, gpus) for _ in range(self.size)] if workers > 1 else []
        shown, hidden = settings_and_secrets({} if there.local else variables(recipe))
        for rank in range(self.size):
            for worker, devices in enumerate(taken):
                made = ray.remote(Actor).options(
                    num_cpus=1 if gpus else devices,
                    num_gpus=gpus * devices,
                    max_concurrency=4,
                    max_restarts=0,
                    scheduling_strategy=scheduling_in(self._rooms[rank] if self._rooms else None, worker),
                    runtime_env={"env_vars": shown} if shown else None,
                )
                self.actors[rank, worker] = made.remote(rank, worker, str(Path.cwd()), hidden)
        self._arguments, self._resume = (loaded, str(directory.path.absolute())), resume
        self._patience = max(PATIENCE, recipe.runtime.patience)
        log = self._log
        self._shown = log.stat().st_size if resume and log.exists() else 0  # older lines were printed before
        self._probe = ProcessProbe(ray)
        self._where: dict[Place, tuple[str, int]] = {}
        self._beats: dict[Place, tuple[Any, float]] = {}
        self._silences: dict[Place, Silence] = {}
        self._signs: dict[Place, Sign] = {}

    def run(self, stop: Stop) -> Outcome:
        """Raises ``LostError``, and errors of a controller that are not the user's."""
        try:
            return self._watch(self._start(), stop)
        finally:
            self._settle()
            if not self.cluster.usable():
                left = [actor.leave.remote() for actor in self.actors.values()]
                self.ray.wait(left, num_returns=len(left), timeout=1)
            else:
                for actor in self.actors.values():
                    self.ray.kill(actor)
                for room in self._rooms:
                    self.ray.util.remove_placement_group(room)
            self._show()

    def _start(self) -> dict[Any, Place]:
        """Start all actors; returns the references of their outcomes. Raises ``LostError`` and ``UserError``."""
        errors = self.ray.exceptions
        running = {}
        try:
            self._check_nodes()
            for ref in [actor.visible.remote() for actor in self.actors.values()]:
                self._get(ref)  # all processes have started: from here on they wait for each other
            settle_replica_devices(self._arguments[0].recipe, self.actors, self._get, self._gpus)
            where = self._get(self.actors[0, 0].listen.remote())
            listening = {}
            for (rank, device), actor in self.actors.items():
                if (rank, 1) in self.actors and device == 0:
                    listening[rank] = self._get(actor.receive.remote())
                work = actor.train.remote if device == 0 else actor.serve.remote
                listener = listening[rank] if device else ()
                running[work(*self._arguments, *where, *listener, resume=self._resume)] = rank, device
        except errors.RayActorError as error:
            raise LostError(f"a controller died while it started ({_last_line(error)})") from error
        except errors.RayError as error:
            logs = self.directory.path / "controllers"
            raise UserError(f"controllers: one could not start ({_last_line(error)}); see {logs}") from error
        return running

    def _get(self, ref: Any) -> Any:
        """The answer of an actor that was just started. Raises ``LostError`` if it takes too long."""
        patience = max(START_S, self._patience)
        until = time.monotonic() + patience
        while not self.ray.wait([ref], timeout=_EVERY)[0]:
            self.cluster.check()
            if time.monotonic() > until:
                free, has = (resources.get(self._kind, 0) for resources in self.cluster.resources())
                raise LostError(
                    f"a controller has not started within {patience:.0f} s; {free:g} of the cluster's {has:g} "
                    f"{self._kind}s are free"
                )
        return self.ray.get(ref)

    def _check_nodes(self) -> None:
        """Raise ``UserError`` if a controller's node lacks the run's directory, or has different versions."""
        mark = self.directory.path.absolute() / f".seen-{uuid.uuid4().hex}"
        mark.touch()
        leading = [self.actors[rank, 0] for rank in range(self.size)]
        try:
            nodes = [self._get(ref) for ref in [actor.describe.remote(str(mark)) for actor in leading]]
        except self.ray.exceptions.RayActorError as error:
            self.cluster.check_nodes()
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
        if not self.cluster.local:
            ship(self._arguments[0], self.actors, self._get)

    def _watch(self, running: dict[Any, Place], stop: Stop) -> Outcome:
        outcomes: dict[int, Outcome] = {}
        announced = False
        while len(outcomes) < self.size:
            done, _ = self.ray.wait(list(running), timeout=_EVERY)
            for ref in done:
                rank, device = running[ref]
                outcome = self._outcome(ref, running)
                if outcome is not None and (device == 0 or outcome.error):
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
            if stop.asked and not announced:
                announced = True
                for rank in range(self.size):
                    self.actors[rank, 0].stop.remote()
        return outcomes[0]

    def _settle(self) -> None:
        """Wait until a checkpoint that the leader is writing is on the disk, if possible."""
        with suppress(self.ray.exceptions.RayError):
            self.ray.get(self.actors[0, 0].settle.remote(), timeout=_GRACE)

    def _outcome(self, ref: Any, running: dict[Any, Place]) -> Outcome | None:
        """The outcome of a controller; None for another device that finished.

        Raises ``LostError`` if it, or a different one that it needed, is gone.
        """
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
        called = in_a_call(self.directory.of_controller(place[0]).path)
        return LostError(f"{self._name(place)} died{called} ({_last_line(error)})")

    def _name(self, place: Place) -> str:
        rank, device = place
        return f"{f'device {device} of ' if device else ''}controller {rank} of {self.size}"

    def _listen(self, running: dict[Any, Place], wait: float = 0.0) -> None:
        """Ask every controller for a sign of life. Raises ``LostError`` if one does not answer for too long."""
        until = time.monotonic() + wait
        while True:
            self.cluster.check()
            for place in running.values():
                ref, asked = self._beats.setdefault(place, (self.actors[place].beat.remote(), time.monotonic()))
                answered, _ = self.ray.wait([ref], timeout=0)
                if answered:
                    del self._beats[place]
                    with suppress(self.ray.exceptions.RayError):  # ``_outcome`` reports a dead one
                        self._record_beat(place, self.ray.get(ref))
                else:
                    self._check_silent(place, time.monotonic() - asked)
            self._check_progress(running.values())
            if time.monotonic() >= until:
                return
            time.sleep(_EVERY)

    def _record_beat(self, place: Place, beat: Beat) -> None:
        self._silences.pop(place, None)
        self._signs[place], self._where[place] = beat.sign, (beat.node, beat.pid)
        if beat.node == self._probe.here:
            self.cluster.register(beat.pid)
        for line in beat.lines if place[0] else ():  # the leader's log is printed anyway
            print(f"{self._name(place)}: {line}", file=sys.stderr)

    def _check_silent(self, place: Place, seconds: float) -> None:
        """Inspect a process that has not answered for ``seconds``. Raises ``LostError`` if it is stopped, or if this
        takes longer than ``runtime.patience``."""
        if seconds < _LOOK:
            return
        silence = self._silences.setdefault(place, Silence())
        if place in self._where:
            silence.see(self._probe.read(*self._where[place]))
        if seconds <= PATIENCE:
            return
        frozen = f"{self._name(place)} is frozen: no sign of life for {seconds:.0f} s"
        if silence.stopped:
            raise LostError(f"{frozen}; {silence}")
        if seconds > self._patience:
            raise LostError(
                f"{frozen}; {silence}. If a reward or a data set of yours holds Python's lock (GIL) for so "
                "long, raise runtime.patience"
            )
        if not silence.reported:
            silence.reported = True
            most = f"at most {duration(self._patience)} (runtime.patience)"
            print(
                f"{self._name(place)} has not answered for {seconds:.0f} s; {silence}. The run waits {most}",
                file=sys.stderr,
            )

    def _check_progress(self, running: Collection[Place]) -> None:
        """Raises ``LostError`` if a process makes no progress and waits for no other, or if all wait."""
        signs = {place: sign for place, sign in self._signs.items() if place in running}
        if said := no_progress(
            signs, self._name, lambda place: [p for p in signs if p[0] == place[0] and p[1] > place[1] == 0]
        ):
            raise LostError(said)

    @property
    def _log(self) -> Path:
        return self.directory.path / "controllers" / "0.log"

    def _show(self) -> None:
        """Print the new lines of the leader's log."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._shown)
                new = file.read()
        except OSError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._shown += len(whole)
        sys.stderr.write(whole.decode(errors="replace"))
        sys.stderr.flush()


def settle_replica_devices(
    recipe: Recipe, actors: Mapping[tuple[int, int], Any], get: Callable[[Any], Any], gpus: int
) -> None:
    """``actors``: those of all controllers, by rank and device. ``get``: waits for an answer of one. ``gpus``: of each,
    0 or 1."""
    led, n = leaders(recipe), recipe.devices_per_controller
    sampling = n - recipe.placement.judging(n)
    for rank in range(recipe.controllers) if led else ():
        own = [get(actors[rank, device].visible.remote()) for device in range(n)] if gpus else []
        for device in range(n):
            together = ",".join(filter(None, own[device : device + led.get(device, 0)]))
            samples = device in led and device < sampling
            get(actors[rank, device].start_servers_on.remote(ServerDevices(together, samples)))
