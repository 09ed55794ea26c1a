"""One process of a run, whoever started it: a controller, or another device of one. All give heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

from mmrl.app.build import build
from mmrl.app.divergence import Divergence
from mmrl.app.trainer import Outcome, Trainer
from mmrl.checkpoint.run_state import saver_of
from mmrl.config.loader import LoadedRecipe
from mmrl.config.replicas import leaders
from mmrl.controller import Controller, preflight
from mmrl.controller.peers import Group
from mmrl.controller.preflight import FirstSum, UnreachedError
from mmrl.core import notices
from mmrl.core.checkpoint_manifest import entries
from mmrl.core.errors import LostProcessError, UserError
from mmrl.core.json_types import Json, as_integer
from mmrl.core.signals import Stop
from mmrl.families.text.pipeline import keep_episodes
from mmrl.inference import server_devices
from mmrl.inference.this_machine import choose_device
from mmrl.logging.rundir import RunDir
from mmrl.placement.multi_device import MultiDevice
from mmrl.rewards.last_words import in_a_call
from mmrl.runtime.heartbeat import HeartbeatMonitor, Processes
from mmrl.runtime.launchers import Launched
from mmrl.runtime.program import PATIENCE, before_cuda, watchdog
from mmrl.runtime.rendezvous import GoneError, RendezvousStore
from mmrl.runtime.stall_watchdog import BETWEEN
from mmrl.runtime.worker import RemoteWorker, WorkerListener, connect, serve
from mmrl.training.callbacks import AnyCallback, Callbacks

_SETTLE = 5.0
"""Seconds at most for a save that has begun, when the run ends."""
_EVERY = 0.2


class RunProcess:
    """Final class: process ``found.rank`` of a run, while a thread watches the others.

    ``loaded``: with workers in place of devices (``in_workers``). ``leave``: ends this process, whose main thread waits
    for one that is lost; it gets how the run ended. ``callbacks``: of the user's, which the leader calls. ``show``:
    prints a line where a user sees it.
    """

    def __init__(
        self,
        loaded: LoadedRecipe,
        whole: RunDir,
        found: Launched,
        store: RendezvousStore,
        processes: Processes,
        leave: Callable[[Outcome], None],
        callbacks: Sequence[AnyCallback] = (),
        show: Callable[[str], None] = print,
    ) -> None:
        recipe, number = loaded.recipe, found.rank
        self._callbacks = callbacks
        self._loaded, self._whole = loaded, whole
        self._found, self._store, self._processes = found, store, processes
        self._rank, device = divmod(number, processes.devices)
        self._worker = processes.workers.index(device) if device in processes.workers else None
        self._trainer: Trainer | None = None
        self._pulse = watchdog(recipe)
        self._leave = leave
        self.monitor = HeartbeatMonitor(
            store.again(),
            number,
            processes,
            recipe.runtime.patience,
            self._pulse,
            lambda why: leave(self._lost(why)),
            show,
            called=lambda n: in_a_call(whole.of_controller(n // processes.devices).path),
        )
        if (devices := processes.servers(recipe, number)) is not None:
            server_devices.settle(devices)

    def run(self, stop: Stop, *, resume: bool) -> Outcome:
        """Do this process's part, to the end of the run."""
        monitor, name, number = self.monitor, self._processes.name, self._found.rank
        try:
            monitor.beat(0)
            waiting = [f"beat/{n}" for n in self._processes.where]
            if missing := self._store.lacking(waiting, self._loaded.recipe.runtime.patience):
                return self._lost(f"{name(int(missing[0].partition('/')[2]))} ended before the run began")
            monitor.watch()
            notices.listen(monitor.tell, self._pulse)
            outcome = self._serve() if self._worker != 0 else self._train(stop, resume=resume)
        except GoneError:
            outcome = self._lost(monitor.broken(PATIENCE) or f"{name(0)} has ended: where all meet nobody answers")
        except UnreachedError as error:
            why = monitor.lost or f"{name(number)}: {error}"
            monitor.close({"error": why, "exit_code": UserError.exit_code})
            outcome = self._lost(why, UserError.exit_code)
            self._leave(outcome)  # a thread of the group may hang, and keep this process from ending
            return outcome
        except Exception as error:
            why = monitor.broken(2 * PATIENCE) if _of_connection(error) else ""
            if not why:
                monitor.close({"error": f"{name(number)} failed: {last_line(error)}", "exit_code": 1})
                raise
            outcome = self._lost(why)
        finally:
            notices.listen(None)
        error = None if outcome.error is None else f"{self._processes.short_name(number)}: {outcome.error}"
        met = None if outcome.divergence is None else asdict(outcome.divergence)
        monitor.close({"error": error, "exit_code": outcome.exit_code, "divergence": met})
        return outcome

    def settle(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._trainer is not None:
            self._trainer.saver.wait()

    def _join(self, worker: int) -> Controller:
        """The controller, connected to the others if this ``worker`` of it trains. Raises ``UnreachedError``."""
        recipe, found = self._loaded.recipe, self._found
        before_cuda(recipe)
        trainers = recipe.placement.training(recipe.devices_per_controller)
        place, size = self._rank * trainers + worker, recipe.controllers * trainers
        if worker >= trainers or size == 1:  # it does not train, or trains alone
            return Controller(recipe.seed, self._rank, recipe.controllers)
        sizes = sorted({n for n in (recipe.train.shard_size, recipe.train.width) if n is not None and 1 < n < size})
        seconds = preflight.seconds_of(recipe.runtime.patience)
        first = FirstSum(str(choose_device(recipe.device)), sizes, seconds, self._processes.hosts(trainers))
        peers = Group(place, size, found.host, found.port, trainers, self._pulse.waiting, self._store.store, first)
        return Controller(recipe.seed, self._rank, recipe.controllers, peers)

    def _train(self, stop: Stop, *, resume: bool) -> Outcome:
        """The part of a controller."""
        workers = self._loaded.recipe.devices_per_controller - 1
        listener = WorkerListener() if workers else None
        if listener is not None:
            self._store.write(f"listener/{self._rank}", listener.address)
        with self._pulse(BETWEEN):
            controller = self._join(0)
            devices = None if listener is None else self._devices(listener, workers)
            outcome = self._train_part(controller, devices, stop, resume=resume)
            self._store.write(f"done/{self._rank}", outcome.finished)
            if self._found.leads and not outcome.error and not self.monitor.all_ended():
                outcome = self._lost(self.monitor.lost)
        return outcome

    def _train_part(self, controller: Controller, devices: MultiDevice | None, stop: Stop, *, resume: bool) -> Outcome:
        """Load, and train the controller's part of the run."""
        recipe, directory = self._loaded.recipe, self._whole.of_controller(self._rank)
        called = Callbacks(self._callbacks, recipe, directory.path, stop) if self._callbacks else None
        try:
            self._trainer = trainer = Trainer(
                self._loaded, directory, controller, self._whole.checkpoints, devices, self._pulse, called
            )
            if devices is not None:
                devices.open(trainer.run)
            return trainer.begin(stop, resume=resume)
        except UserError as error:
            return Outcome(False, 0, 0, 0.0, str(error))

    def _devices(self, listener: WorkerListener, workers: int) -> MultiDevice:
        """The controller's devices, after the others have connected."""
        connections = listener.accept(workers)
        others = [RemoteWorker(n, one, notices.tell, notices.starting) for n, one in enumerate(connections, 1)]
        recipe = self._loaded.recipe
        return MultiDevice(others, recipe.placement, notices.starting, leaders(recipe))

    def _serve(self) -> Outcome:
        """The part of another device: the tasks of its controller."""
        if self._worker is not None and (address := self._told(f"listener/{self._rank}")) is not None:
            controller = self._join(self._worker)
            connection = connect(self._worker, str(address))
            try:
                with self._pulse("load"):
                    run = build(self._loaded.recipe, controller)
            except UserError as error:  # the controller reports the same error, or that this device is missing
                return Outcome(False, 0, 0, 0.0, str(error))
            run.rewards.folder = self._whole.of_controller(self._rank).path
            keep_episodes(run.pipeline, run.rewards.folder)
            serve(run, connection, saver_of(run, self._whole.checkpoints), self._pulse)
        finished = self._told(f"done/{self._rank}")
        return self._lost(self.monitor.lost) if finished is None else Outcome(bool(finished), 0, 0, 0.0)

    def _told(self, key: str) -> Json:
        """A note of this device's controller, once it is there; None if a process is lost before."""
        while not self.monitor.lost:
            with suppress(GoneError):  # the monitor finds it too
                if self._store.has(key):
                    return self._store.read(key)
            time.sleep(_EVERY)
        return None

    def _lost(self, why: str, code: int = LostProcessError.exit_code) -> Outcome:
        """How the run ends without a process that is lost, or has failed. A save that has begun is finished."""
        until = time.monotonic() + _SETTLE
        while self._trainer is not None and self._trainer.saver.writing and time.monotonic() < until:
            time.sleep(0.1)
        saved = max((entry.step for entry in entries(self._whole.checkpoints) if entry.usable), default=0)
        failed = self.monitor.failed or {}
        code, met = as_integer(failed.get("exit_code", code)), failed.get("divergence")
        diverged = Divergence(**met) if isinstance(met, dict) else None  # pyright: ignore[reportArgumentType]
        return Outcome(False, saved, saved, 0.0, why, None, diverged, code)


def _of_connection(error: Exception) -> bool:
    """Whether a collective or a device failed because another process is gone."""
    words = ("connection", "gloo", "nccl", "timed out", "socket", "broken pipe", "is gone")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[-1] or type(error).__name__
