"""Start the processes of a run as Ray actors, and start all again from the last checkpoint if one is lost.

This process does no work of a step. It prints the leader's log as it grows.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmrl.app.trainer import Outcome
from mmrl.config.loader import LoadedRecipe
from mmrl.config.replicas import devices_of_workers, in_workers
from mmrl.core.checkpoint_manifest import entries
from mmrl.core.errors import LostProcessError, UserError
from mmrl.core.json_types import as_integer
from mmrl.core.notices import silent
from mmrl.core.signals import Stop
from mmrl.logging.rundir import RunDir
from mmrl.rewards.last_words import in_a_call
from mmrl.runtime.actor import Actor, packed
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
from mmrl.runtime.heartbeat import Processes
from mmrl.runtime.process import last_line
from mmrl.runtime.program import versions
from mmrl.runtime.shipped import settings_and_secrets, ship, variables
from mmrl.training.callbacks import AnyCallback, as_callback

_EVERY = 0.5
_GRACE = 5.0
"""Seconds to wait for Ray to report a lost controller, after a different one has failed because of it."""
_NODE_GONE = 15.0
"""Seconds until Ray reports a lost node; it reports a controller's end before that of its node."""
_RESTARTS = 3
"""Losses in a row, without a checkpoint between them, after which the run stops."""


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


def launch(
    loaded: LoadedRecipe, directory: RunDir, stop: Stop, *, resume: bool, callbacks: Sequence[AnyCallback] = ()
) -> Outcome:
    """Run the recipe's controllers to the end of training, or to a stop. The leader calls copies of ``callbacks``.
    Raises ``UserError``."""
    for one in callbacks:
        as_callback(one)
    losses = Losses(directory)
    outcome = None
    while outcome is None:
        with cluster(loaded.recipe) as there:
            given = packed(callbacks, there.ray.cloudpickle.dumps)
            outcome = _train(there, loaded, directory, resume, stop, losses, given)
        resume = True
    return outcome


def _train(
    there: Cluster,
    loaded: LoadedRecipe,
    directory: RunDir,
    resume: bool,
    stop: Stop,
    losses: Losses,
    callbacks: bytes,
) -> Outcome | None:
    """All starts of the controllers in one cluster. None if it was lost, and a new one can be started."""
    while True:
        try:
            return RayStart(there, loaded, directory, resume=resume, callbacks=callbacks).run(stop)
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


class RayStart:
    """Final class: one start of all processes, until they finish or one is lost. They watch each other; this process
    watches Ray, and hears of their ends."""

    def __init__(
        self, there: Cluster, loaded: LoadedRecipe, directory: RunDir, *, resume: bool, callbacks: bytes = b""
    ) -> None:
        recipe, taken = in_workers(loaded.recipe), devices_of_workers(loaded.recipe)
        self._loaded = replace(loaded, recipe=recipe)
        self.cluster, self.ray, self.directory = there, there.ray, directory
        gpus = 1 if on_gpu(recipe.device) else 0
        self._kind, self._each = "GPU" if gpus else "CPU", len(taken)
        rooms = [
            reserve_host(there, loaded.recipe, taken, gpus) for _ in range(recipe.controllers if self._each > 1 else 0)
        ]
        self._rooms = rooms
        shown, hidden = settings_and_secrets({} if there.local else variables(recipe))
        self.actors: list[Any] = []
        for number in range(recipe.controllers * self._each):
            rank, worker = divmod(number, self._each)
            made = self.ray.remote(Actor).options(
                num_cpus=1 if gpus else taken[worker],
                num_gpus=gpus * taken[worker],
                max_concurrency=6,
                max_restarts=0,
                scheduling_strategy=scheduling_in(rooms[rank] if rooms else None, worker),
                runtime_env={"env_vars": shown} if shown else None,
            )
            self.actors.append(made.remote(number, str(Path.cwd()), hidden))
        self._resume, self._callbacks = resume, callbacks
        log = self._log
        self._shown = log.stat().st_size if resume and log.exists() else 0  # older lines were printed before

    def run(self, stop: Stop) -> Outcome:
        """Raises ``LostError``, and errors of a process that are not the user's."""
        try:
            return self._watch(self._start(), stop)
        finally:
            self._settle()
            if not self.cluster.usable():
                left = [actor.leave.remote() for actor in self.actors]
                self.ray.wait(left, num_returns=len(left), timeout=1)
            else:
                for actor in self.actors:
                    self.ray.kill(actor)
                for room in self._rooms:
                    self.ray.util.remove_placement_group(room)
            self._show()

    def _start(self) -> dict[Any, int]:
        """Start all actors; returns the references of their ends. Raises ``LostError`` and ``UserError``."""
        errors = self.ray.exceptions
        try:
            self._check_nodes()
            where = dict(enumerate(map(self._get, [actor.whereabouts.remote() for actor in self.actors])))
            for its in where.values():  # all processes have started: from here on they wait for each other
                self.cluster.register(as_integer(its["pid"]))
            self._processes = Processes(where, self._each, range(self._each))
            address = self._get(self.actors[0].listen.remote())
        except errors.RayActorError as error:
            raise LostError(f"a controller died while it started ({last_line(error)})") from error
        except errors.RayError as error:
            logs = self.directory.path / "controllers"
            raise UserError(f"controllers: one could not start ({last_line(error)}); see {logs}") from error
        given = self._loaded, str(self.directory.path.absolute()), self._processes, *address
        called = [self._callbacks, *[b""] * (len(self.actors) - 1)]  # by the leader alone
        ends = {
            actor.run.remote(*given, resume=self._resume, callbacks=called[n]): n for n, actor in enumerate(self.actors)
        }
        return ends | {actor.left.remote(): n for n, actor in enumerate(self.actors)}

    def _get(self, ref: Any) -> Any:
        """The answer of an actor that was just started. Raises ``LostError`` if it takes too long."""
        patience = max(START_S, self._loaded.recipe.runtime.patience)
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
        leading = self.actors[:: self._each]
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
            ship(self._loaded, self.actors, self._each, self._get)

    def _watch(self, running: dict[Any, int], stop: Stop) -> Outcome:
        announced = False
        while True:
            done, _ = self.ray.wait(list(running), timeout=_EVERY)
            for ref in done:
                number, outcome = running[ref], self._outcome(ref, running)
                del running[ref]
                if outcome.error:
                    return self._failed(outcome, running)
                if number == 0:  # it waits for all others
                    return outcome
            self.cluster.check()
            self._show()
            if stop.asked and not announced:
                announced = True
                for actor in self.actors:
                    actor.stop.remote()

    def _outcome(self, ref: Any, running: dict[Any, int]) -> Outcome:
        """How a process ended. Raises ``LostError`` if it is gone, or has lost another, and errors that are not the
        user's."""
        try:
            outcome = self.ray.get(ref)
        except self.ray.exceptions.RayActorError as error:
            number = running[ref]
            called = in_a_call(self.directory.of_controller(number // self._each).path)
            raise LostError(f"{self._processes.short_name(number)} died{called} ({last_line(error)})") from error
        if outcome.exit_code == LostProcessError.exit_code:
            raise LostError(outcome.error)
        return outcome

    def _failed(self, outcome: Outcome, running: dict[Any, int]) -> Outcome:
        """The outcome of all after that of one, which has an error. Raises an error that is not the user's."""
        if outcome.exit_code != UserError.exit_code:  # all stop, and the leader saves; or one of the others has failed
            done, _ = self.ray.wait(list(running), num_returns=len(self.actors) - 1, timeout=_GRACE)
            for ref in done:
                self._outcome(ref, running)
        self._settle()
        return replace(outcome, finished=False, saved=_saved(self.directory))

    def _settle(self) -> None:
        """Wait until a checkpoint that the leader is writing is on the disk, if possible."""
        with suppress(self.ray.exceptions.RayError):
            self.ray.get(self.actors[0].settle.remote(), timeout=_GRACE)

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
        lines = whole.decode(errors="replace").splitlines(keepends=True)
        sys.stderr.writelines(line for line in lines if not silent(line))
        sys.stderr.flush()
