"""Train a recipe in processes that a launcher has started (torchrun, Slurm): one for each device.

Consecutive processes are the devices of one controller, and the first of them is the controller itself. Process 0
leads: it owns the run directory, prints, and writes the report. The others write into ``controllers/``.
Before a model is loaded, all compare what they are about to do.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from mmrl.app.resume import flatten
from mmrl.app.trainer import Outcome
from mmrl.config.checks import impossibilities
from mmrl.config.left_to_plan import KEYS, value_of, with_values
from mmrl.config.loader import LoadedRecipe
from mmrl.config.replicas import devices_of_workers, in_workers
from mmrl.config.schema import Recipe
from mmrl.core.durations import duration
from mmrl.core.errors import LostProcessError, UserError, first_of, refuse
from mmrl.core.json_types import Json, JsonObject, as_object
from mmrl.core.secrets import hidden, masked, remember
from mmrl.core.signals import stop_on_signal
from mmrl.logging.rundir import RunDir, has_begun
from mmrl.runtime.heartbeat import Processes, whereabouts
from mmrl.runtime.launchers import Launched
from mmrl.runtime.process import RunProcess
from mmrl.runtime.program import before_cuda, log_to, sees, versions
from mmrl.runtime.rendezvous import GoneError, RendezvousStore, meet
from mmrl.runtime.shipped import variables
from mmrl.runtime.start import OpenRun, came_to_end, command, opened, resumed

_SETTLE = 5.0
"""Seconds at most for the others to read why the run does not begin."""
_MADE_HERE = ("model.dtype", "train.steps_per_forward", *KEYS)
"""Keys whose ``auto`` process 0 chooses for all."""


def with_processes(loaded: LoadedRecipe, found: Launched) -> LoadedRecipe:
    """The recipe with as many devices as processes. Raises ``UserError`` where it asks for another number."""
    recipe = loaded.recipe
    n, devices = recipe.controllers, recipe.devices_per_controller
    if n * devices == found.size:
        return loaded
    each = "each a controller" if devices == 1 else "one for each device"
    started = f"{found.launcher} started {found.size} processes, {each}"
    if found.size % devices:
        raise UserError(
            f"devices_per_controller: {started}, and controllers of {devices} need a multiple of {devices}; start "
            f"{-(-found.size // devices) * devices} processes ({found.processes}), or set devices_per_controller=1"
        )
    stored = loaded.continues is not None and not any(key == "controllers" for key, *_ in loaded.continues.changes)
    if loaded.source("controllers") != "default" and not stored:
        of = f" of {devices} devices" if devices > 1 else ""
        raise UserError(
            f"controllers: the recipe has {n}{of} ({loaded.source('controllers')}), and {started}; set "
            f"controllers={found.size // devices} or leave it out, or start {n * devices} processes ({found.processes})"
        )
    recipe = recipe.model_copy(update={"controllers": found.size // devices})
    refuse(impossibilities(recipe))
    return replace(loaded, recipe=recipe)


def train(loaded: LoadedRecipe, found: Launched, out: Path, *, resume: bool, overwrite: bool) -> bool:
    """Train this process's part. Returns whether the run came to its end; raises as ``mmrl.runtime.start.train``."""
    if loaded.recipe.warm_start is not None:
        raise UserError(
            f"warm_start: {found.launcher} has started the processes of one run, and this recipe asks for two; train "
            "the first with mmrl train, then begin with its weights: model.lora.path (mmrl export), without warm_start"
        )
    remember(variables(loaded.recipe))
    before_cuda(loaded.recipe)
    store = meet(found, loaded.recipe.runtime.patience)
    try:
        if found.leads:
            return _lead(loaded, found, store, out, resume=resume, overwrite=overwrite)
        return _follow(loaded, found, store)
    except GoneError as error:
        raise LostProcessError(
            f"{found.launcher}: process 0 has ended: nobody answers at {found.host}:{found.port}"
        ) from error


def _about(loaded: LoadedRecipe, found: Launched) -> JsonObject:
    """What a process says of itself before anything is loaded."""
    gpus: list[Json] = []
    if loaded.recipe.device != "cpu" and torch.cuda.is_available():
        gpus = [str(torch.cuda.get_device_properties(0).uuid)]
    settings = flatten(masked(loaded.resolved()))
    return {
        "size": found.size,
        "versions": versions(),
        "gpus": gpus,
        "recipe": {key: json.dumps(value, sort_keys=True) for key, value in settings.items()},
        "chose_dtype": loaded.chose_dtype,
        **whereabouts(),
    }


def _lead(
    loaded: LoadedRecipe, found: Launched, store: RendezvousStore, out: Path, *, resume: bool, overwrite: bool
) -> bool:
    begun = False
    try:
        store.write("about/0", _about(loaded, found))
        others = _gathered(store, found, loaded.recipe.runtime.patience, loaded.recipe.devices_per_controller)
        again = found.restarts > 0 and has_begun(out)  # the launcher has started the job anew
        with opened(loaded, out, resume=resume or again, overwrite=overwrite and not again) as run:
            run = replace(run, launcher=found.command)
            processes = _begin(run, store, others, resume=resume or again)
            begun = True
            mine = replace(run.loaded, recipe=in_workers(run.recipe))
            process = RunProcess(mine, run.directory, found, store, processes, partial(_conclude, run))
            outcome = process.run(run.stop, resume=resume or again)
            run.conclude(outcome)
    except BaseException as error:
        if not begun:
            _refuse(store, found, str(error) or type(error).__name__)
        raise
    return came_to_end(outcome, run.stop)


def _conclude(run: OpenRun, outcome: Outcome) -> NoReturn:
    """End process 0, whose main thread waits for a process that is lost."""
    try:
        run.conclude(outcome)
    except UserError as error:
        _say(2, str(error))
    os._exit(outcome.exit_code)


def _refuse(store: RendezvousStore, found: Launched, why: str) -> None:
    """Tell the others that the run does not begin. Those that have come have read it before this process ends."""
    with suppress(GoneError):
        store.write("refused", why)
        came = [rank for rank in range(1, found.size) if store.has(f"came/{rank}")]
        store.lacking([f"left/{rank}" for rank in came], _SETTLE)


def _gathered(store: RendezvousStore, found: Launched, patience: float, devices: int) -> dict[int, JsonObject]:
    """What all processes said of themselves. Raises ``UserError`` for one that is missing or does something else."""
    missing = store.lacking([f"about/{rank}" for rank in range(found.size)], patience, unless="wrong")
    if store.has("wrong"):
        raise UserError(str(store.read("wrong")))
    if missing:
        ranks = [key.partition("/")[2] for key in missing]
        raise UserError(
            f"{found.launcher}: of {found.size} processes {first_of(ranks, 8)} did not come within "
            f"{duration(patience)} (runtime.patience); see what they printed, or start them all at once"
        )
    said = store.read_all([f"about/{rank}" for rank in range(found.size)])
    every = dict(enumerate(map(as_object, said)))
    _compare(every, found)
    _on_one_host(every, found, devices)
    return every


def _compare(every: dict[int, JsonObject], found: Launched) -> None:
    """Raise ``UserError`` if a process runs something else than process 0, or on its GPU."""
    mine, owners = every[0], dict[tuple[Json, Json], int]()
    for rank, its in every.items():
        who = f"process {rank} on {its['host']}"
        if its["size"] != mine["size"]:
            raise UserError(
                f"{found.launcher}: {who} is one of {its['size']} processes, and process 0 one of {mine['size']}; "
                "start all with the same number"
            )
        if its["versions"] != mine["versions"]:
            raise UserError(
                f"{who} has {its['versions']}, and process 0 {mine['versions']}; install the same on all hosts"
            )
        a, b = as_object(mine["recipe"]), as_object(its["recipe"])
        free = {key for key in _MADE_HERE if key != "model.dtype" or mine["chose_dtype"]}
        if different := [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key) and key not in free]:
            key = different[0]
            more = f", and {len(different) - 1} more keys" if len(different) > 1 else ""
            raise UserError(
                f"{who} has another recipe than process 0: {key} is {b.get(key)}, and {a.get(key)} there{more}; "
                "start all processes with the same command, and with the same files under the same paths"
            )
        for gpu in its["gpus"] if isinstance(its["gpus"], list) else ():
            other = owners.setdefault((its["host"], gpu), rank)
            if other != rank:
                raise UserError(
                    f"processes {other} and {rank} have the same GPU of {its['host']}; start as many processes a host "
                    "as it has GPUs, and let each see all of them, or only its own"
                )


def _on_one_host(every: Mapping[int, JsonObject], found: Launched, devices: int) -> None:
    """Raise ``UserError`` if the processes of a controller's devices are not of one host."""
    for number, its in every.items():
        first = every[number - number % devices]
        if its["host"] != first["host"]:
            raise UserError(
                f"devices_per_controller: controller {number // devices} would have its {devices} devices on "
                f"{first['host']} and {its['host']}, and devices of a controller are of one host; start a multiple of "
                f"{devices} processes on each host ({found.processes_of_a_host})"
            )


def _processes(recipe: Recipe, where: Mapping[int, JsonObject]) -> Processes:
    widths = devices_of_workers(recipe)
    return Processes(where, recipe.devices_per_controller, [sum(widths[:n]) for n in range(len(widths))])


def _begin(run: OpenRun, store: RendezvousStore, others: dict[int, JsonObject], *, resume: bool) -> Processes:
    """Let the others begin, once each has seen the run directory. Raises ``UserError``."""
    path = run.directory.path.absolute()
    mark = path / f".seen-{uuid.uuid4().hex}"
    mark.touch()
    recipe = run.recipe
    choices: JsonObject = {key: value_of(recipe, key) for key in _MADE_HERE}
    try:
        store.write("begin", {"path": str(path), "mark": str(mark), "resume": resume, "choices": choices})
        waiting = [f"sees/{rank}" for rank in others if rank]
        missing = store.lacking(waiting, recipe.runtime.patience)
        if missing:
            raise UserError(f"process {missing[0].partition('/')[2]} ended before the run began; see what it printed")
        blind = [rank for rank in others if rank and not store.read(f"sees/{rank}")]
    finally:
        mark.unlink()
    if blind:
        raise UserError(
            f"--out: {others[blind[0]]['host']}, the host of process {blind[0]}, does not see {path}, where all "
            "controllers write; name a directory that all hosts share"
        )
    where = {rank: {k: its[k] for k in whereabouts()} for rank, its in others.items()}
    store.write("go", {str(rank): its for rank, its in where.items()})
    return _processes(recipe, where)


def _follow(loaded: LoadedRecipe, found: Launched, store: RendezvousStore) -> bool:
    patience = loaded.recipe.runtime.patience
    if not store.first(f"came/{found.rank}"):
        wrong = f"{found.launcher}: two processes are number {found.rank} of {found.size}; give each its own number"
        store.write("wrong", wrong)
        raise SystemExit(UserError.exit_code)
    store.write(f"about/{found.rank}", _about(loaded, found))
    begin = as_object(_told(store, found, "begin", 2 * patience))
    store.write(f"sees/{found.rank}", sees(str(begin["mark"])))
    others = {int(rank): as_object(its) for rank, its in as_object(_told(store, found, "go", patience)).items()}
    loaded = replace(loaded, recipe=with_values(loaded.recipe, as_object(begin["choices"])))
    processes = _processes(loaded.recipe, others)
    whole, resume = RunDir(str(begin["path"])), bool(begin["resume"])
    with (
        _into(whole.path / "controllers" / processes.log(found.rank), keep=resume) as terminal,
        stop_on_signal() as stop,
    ):

        def leave(outcome: Outcome) -> NoReturn:
            say_for_leader(outcome)
            os._exit(outcome.exit_code)

        def say_for_leader(outcome: Outcome) -> None:
            why = outcome.error or ""  # of process 0, that is lost itself: process 1 says it for all
            if found.rank == 1 and why.startswith(processes.name(0)):
                again = resumed(loaded, found.command(command(loaded, whole.path)))
                _say(terminal, f"error: {why}\nsteps up to {outcome.saved} are saved; continue with: {again}")

        mine = replace(loaded, recipe=in_workers(loaded.recipe))
        outcome = RunProcess(mine, whole, found, store, processes, leave, show=partial(_say, terminal)).run(
            stop, resume=resume
        )
        say_for_leader(outcome)
    if outcome.error:
        raise SystemExit(outcome.exit_code)
    return came_to_end(outcome, stop)


def _told(store: RendezvousStore, found: Launched, key: str, patience: float) -> Json:
    """A note of process 0. Ends this process where that one has refused the run: it prints why."""
    missing = store.lacking([key], patience, unless="refused")
    if missing and not store.has("refused"):
        raise UserError(f"process 0 has not begun within {duration(patience)}; see what it printed")
    if missing:
        store.write(f"left/{found.rank}", True)
        raise SystemExit(UserError.exit_code)
    return store.read(key)


@contextmanager
def _into(log: Path, *, keep: bool) -> Generator[int]:
    """What this process prints goes into ``log``; yields where it went before."""
    before = os.dup(1), os.dup(2)
    log_to(log, keep=keep)
    try:
        yield before[1]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, kept in zip((1, 2), before, strict=True):
            os.dup2(kept, stream)
            os.close(kept)


def _say(terminal: int, text: str) -> None:
    os.write(terminal, f"{hidden(text)}\n".encode())
