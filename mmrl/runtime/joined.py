"""Train a recipe in processes that a launcher has started (torchrun, Slurm): each is one controller of the run.

Process 0 leads: it owns the run directory, prints, and writes the report. The others write into ``controllers/``.
Before a model is loaded, all compare what they are about to do.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from mmrl.app.divergence import Divergence
from mmrl.app.resume import flatten
from mmrl.app.trainer import Outcome, Session
from mmrl.config.checks import impossibilities
from mmrl.config.left_to_plan import KEYS, with_values
from mmrl.config.loader import LoadedRecipe
from mmrl.controller.preflight import UnreachedError
from mmrl.core import notices
from mmrl.core.checkpoint_manifest import entries
from mmrl.core.durations import duration
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject, as_object
from mmrl.core.secrets import hidden, masked, remember
from mmrl.core.signals import Stop, stop_on_signal
from mmrl.logging.rundir import RunDir, has_begun
from mmrl.rewards.last_words import in_a_call
from mmrl.runtime.board import Board, GoneError, meet
from mmrl.runtime.launchers import Launched
from mmrl.runtime.program import PATIENCE, Meeting, before_cuda, join, log_to, train_part, versions, watchdog
from mmrl.runtime.shipped import variables
from mmrl.runtime.stall_watchdog import BETWEEN
from mmrl.runtime.start import OpenRun, command, opened, resumed
from mmrl.runtime.vigil import Vigil, whereabouts

_SEEN = 5.0
"""Seconds for a file written on one host to become visible on the others."""
_SETTLE = 5.0
"""Seconds at most for what has begun, when the run ends: a save, or the others reading why it does not begin."""
_MADE_HERE = ("model.dtype", "train.steps_per_forward", *KEYS)
"""Keys whose ``auto`` process 0 chooses for all."""


def with_processes(loaded: LoadedRecipe, found: Launched) -> LoadedRecipe:
    """The recipe with as many controllers as processes. Raises ``UserError`` where it asks for another number."""
    recipe = loaded.recipe
    if recipe.controllers == found.size:
        return loaded
    stored = loaded.continues is not None and not any(key == "controllers" for key, *_ in loaded.continues.changes)
    if loaded.source("controllers") != "default" and not stored:
        raise UserError(
            f"controllers: the recipe has {recipe.controllers} ({loaded.source('controllers')}), and {found.launcher} "
            f"started {found.size} processes, each a controller; set controllers={found.size} or leave it out, or "
            f"start {recipe.controllers} processes ({found.processes})"
        )
    recipe = recipe.model_copy(update={"controllers": found.size})
    if problems := list(impossibilities(recipe)):
        raise UserError("\n".join(problems))
    return replace(loaded, recipe=recipe)


def train(loaded: LoadedRecipe, found: Launched, out: Path, *, resume: bool, overwrite: bool) -> bool:
    """Train this process's part. Returns whether the run came to its end; raises as ``mmrl.runtime.start.train``."""
    if loaded.recipe.devices_per_controller > 1:
        raise UserError(
            f"devices_per_controller: {found.launcher} starts a process for each device; set it to 1, and start as "
            f"many processes as devices ({found.processes})"
        )
    remember(variables(loaded.recipe))
    before_cuda(loaded.recipe)
    board = meet(found, loaded.recipe.runtime.patience)
    try:
        if found.leads:
            return _lead(loaded, found, board, out, resume=resume, overwrite=overwrite)
        return _follow(loaded, found, board)
    except GoneError as error:
        raise UserError(
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


def _lead(loaded: LoadedRecipe, found: Launched, board: Board, out: Path, *, resume: bool, overwrite: bool) -> bool:
    begun = False
    try:
        board.write("about/0", _about(loaded, found))
        others = _gathered(board, found, loaded.recipe.runtime.patience)
        again = found.restarts > 0 and has_begun(out)  # the launcher has started the job anew
        with opened(loaded, out, resume=resume or again, overwrite=overwrite and not again) as run:
            run = replace(run, launcher=found.command)
            _begin(run, board, others, resume=resume or again)
            begun = True
            work = _Work(run.loaded, run.directory, found, board, others, run)
            outcome = work.train(run.stop, resume=resume or again)
            run.conclude(outcome)
    except BaseException as error:
        if not begun:
            _refuse(board, found, str(error) or type(error).__name__)
        raise
    if run.stop.exit_code and not outcome.finished:
        raise SystemExit(run.stop.exit_code)
    return outcome.finished


def _refuse(board: Board, found: Launched, why: str) -> None:
    """Tell the others that the run does not begin. Those that have come have read it before this process ends."""
    with suppress(GoneError):
        board.write("refused", why)
        came = [rank for rank in range(1, found.size) if board.has(f"came/{rank}")]
        board.lacking([f"left/{rank}" for rank in came], _SETTLE)


def _gathered(board: Board, found: Launched, patience: float) -> dict[int, JsonObject]:
    """What all processes said of themselves. Raises ``UserError`` for one that is missing or does something else."""
    missing = board.lacking([f"about/{rank}" for rank in range(found.size)], patience, unless="wrong")
    if board.has("wrong"):
        raise UserError(str(board.read("wrong")))
    if missing:
        ranks = [key.partition("/")[2] for key in missing]
        named = ", ".join(ranks[:8]) + (", ..." if len(ranks) > 8 else "")
        raise UserError(
            f"{found.launcher}: of {found.size} processes {named} did not come within {duration(patience)} "
            "(runtime.patience); see what they printed, or start them all at once"
        )
    said = board.read_all([f"about/{rank}" for rank in range(found.size)])
    every = dict(enumerate(map(as_object, said)))
    _compare(every, found)
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


def _begin(run: OpenRun, board: Board, others: dict[int, JsonObject], *, resume: bool) -> None:
    """Let the others begin, once each has seen the run directory. Raises ``UserError``."""
    path = run.directory.path.absolute()
    mark = path / f".seen-{uuid.uuid4().hex}"
    mark.touch()
    recipe = run.recipe
    settings = recipe.model_dump(mode="json", include={"model", "train", "sampling"})
    choices: JsonObject = {key: settings[key.partition(".")[0]].get(key.partition(".")[2]) for key in _MADE_HERE}
    try:
        board.write("begin", {"path": str(path), "mark": str(mark), "resume": resume, "choices": choices})
        waiting = [f"sees/{rank}" for rank in others if rank]
        missing = board.lacking(waiting, recipe.runtime.patience)
        if missing:
            raise UserError(f"process {missing[0].partition('/')[2]} ended before the run began; see what it printed")
        blind = [rank for rank in others if rank and not board.read(f"sees/{rank}")]
    finally:
        mark.unlink()
    if blind:
        raise UserError(
            f"--out: {others[blind[0]]['host']}, the host of process {blind[0]}, does not see {path}, where all "
            "controllers write; name a directory that all hosts share"
        )
    board.write("go", {str(rank): {k: its[k] for k in whereabouts()} for rank, its in others.items()})


def _follow(loaded: LoadedRecipe, found: Launched, board: Board) -> bool:
    patience = loaded.recipe.runtime.patience
    if not board.first(f"came/{found.rank}"):
        wrong = f"{found.launcher}: two processes are number {found.rank} of {found.size}; give each its own number"
        board.write("wrong", wrong)
        raise SystemExit(UserError.exit_code)
    board.write(f"about/{found.rank}", _about(loaded, found))
    begin = as_object(_told(board, found, "begin", 2 * patience))
    until = time.monotonic() + _SEEN
    while not (seen := Path(str(begin["mark"])).exists()) and time.monotonic() < until:
        time.sleep(0.2)
    board.write(f"sees/{found.rank}", seen)
    others = {int(rank): as_object(its) for rank, its in as_object(_told(board, found, "go", patience)).items()}
    loaded = replace(loaded, recipe=with_values(loaded.recipe, as_object(begin["choices"])))
    whole, resume = RunDir(str(begin["path"])), bool(begin["resume"])
    with _into_log(whole, found.rank, keep=resume) as terminal, stop_on_signal() as stop:
        work = _Work(loaded, whole, found, board, others, terminal=terminal)
        outcome = work.train(stop, resume=resume)
        work.say_for_leader(outcome)
    if outcome.error:
        raise SystemExit(outcome.exit_code)
    if stop.exit_code and not outcome.finished:
        raise SystemExit(stop.exit_code)
    return outcome.finished


def _told(board: Board, found: Launched, key: str, patience: float) -> Json:
    """A note of process 0. Ends this process where that one has refused the run: it prints why."""
    missing = board.lacking([key], patience, unless="refused")
    if missing and not board.has("refused"):
        raise UserError(f"process 0 has not begun within {duration(patience)}; see what it printed")
    if missing:
        board.write(f"left/{found.rank}", True)
        raise SystemExit(UserError.exit_code)
    return board.read(key)


@contextmanager
def _into_log(whole: RunDir, rank: int, *, keep: bool) -> Generator[int]:
    """What this process prints goes into ``controllers/RANK.log``; yields where it went before."""
    before = os.dup(1), os.dup(2)
    log_to(whole.path / "controllers" / f"{rank}.log", keep=keep)
    try:
        yield before[1]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, kept in zip((1, 2), before, strict=True):
            os.dup2(kept, stream)
            os.close(kept)


class _Work:
    """Final class: the work of this process, while a thread watches the others. ``run``: of process 0. ``terminal``:
    where errors go."""

    def __init__(
        self,
        loaded: LoadedRecipe,
        whole: RunDir,
        found: Launched,
        board: Board,
        others: dict[int, JsonObject],
        run: OpenRun | None = None,
        terminal: int = 2,
    ) -> None:
        self._loaded, self._whole, self._found, self._board, self._others = loaded, whole, found, board, others
        self._run = run
        self._terminal = terminal
        self._session: Session | None = None
        self._pulse = watchdog(loaded.recipe)
        patience = loaded.recipe.runtime.patience
        self._vigil = Vigil(board.again(), found.rank, others, patience, self._pulse, self._leave, called=self._called)

    def train(self, stop: Stop, *, resume: bool) -> Outcome:
        """Train this process's part to the end of all."""
        recipe, found, vigil = self._loaded.recipe, self._found, self._vigil
        vigil.begin()
        if missing := self._board.lacking([f"beat/{rank}" for rank in self._others], recipe.runtime.patience):
            return self._lost(f"{vigil.name(int(missing[0].partition('/')[2]))} ended before the run began")
        vigil.watch()
        notices.listen(vigil.tell, self._pulse)
        try:
            hosts = {rank: str(its["host"]) for rank, its in self._others.items()}
            meeting = Meeting(found.host, found.port, store=self._board.store, hosts=hosts)
            controller = join(recipe, found.rank, 0, meeting, self._pulse.waiting)
            pulse, begun = self._pulse, self._begun
            with pulse(BETWEEN):
                outcome = train_part(self._loaded, self._whole, controller, None, pulse, stop, begun, resume=resume)
                if found.leads and not outcome.error and not vigil.all_ended():
                    outcome = self._lost(vigil.lost)
        except UnreachedError as error:
            why = vigil.lost or f"{vigil.name(found.rank)}: {error}"
            vigil.close({"error": why, "exit_code": UserError.exit_code})
            self._leave(why)  # a thread of the group may hang, and keep this process from ending
            raise
        except Exception as error:
            why = vigil.broken(2 * PATIENCE) if _of_connection(error) else ""
            if not why:
                vigil.close({"error": f"{vigil.name(found.rank)} failed: {_last_line(error)}", "exit_code": 1})
                raise
            outcome = self._lost(why)
        finally:
            notices.listen(None)
        error = None if outcome.error is None else f"controller {found.rank} of {found.size}: {outcome.error}"
        met = None if outcome.divergence is None else asdict(outcome.divergence)
        vigil.close({"error": error, "exit_code": outcome.exit_code, "divergence": met})
        return outcome

    def _called(self, rank: int) -> str:
        return in_a_call(self._whole.of_controller(rank).path)

    def _begun(self, session: Session) -> None:
        self._session = session

    def _lost(self, why: str) -> Outcome:
        """How the run ends without a process that is lost, or has failed. A save that has begun is finished."""
        until = time.monotonic() + _SETTLE
        while self._session is not None and self._session.saver.writing and time.monotonic() < until:
            time.sleep(0.1)
        saved = max((entry.step for entry in entries(self._whole.checkpoints) if entry.usable), default=0)
        failed = self._vigil.failed or {}
        code, met = failed.get("exit_code", UserError.exit_code), failed.get("divergence")
        assert isinstance(code, int)
        diverged = Divergence(**met) if isinstance(met, dict) else None  # pyright: ignore[reportArgumentType]
        return Outcome(False, saved, saved, 0.0, why, None, diverged, code)

    def _leave(self, why: str) -> None:
        """End this process, whose main thread waits for one that is lost. One process says why."""
        outcome = self._lost(why)
        if self._run is None:
            self.say_for_leader(outcome)
        else:
            try:
                self._run.conclude(outcome)
            except UserError as error:
                self._say(str(error))
        os._exit(outcome.exit_code)

    def say_for_leader(self, outcome: Outcome) -> None:
        """Say why the run ends where process 0 cannot: it is lost itself. Process 1 says it for all."""
        why = outcome.error or ""
        if self._found.rank == 1 and why.startswith(self._vigil.name(0)):
            again = resumed(self._loaded, self._found.command(command(self._loaded, self._whole.path)))
            self._say(f"{why}\nsteps up to {outcome.saved} are saved; continue with: {again}")

    def _say(self, text: str) -> None:
        os.write(self._terminal, f"error: {hidden(text)}\n".encode())


def _of_connection(error: Exception) -> bool:
    """Whether a collective failed because another process is gone."""
    return isinstance(error, RuntimeError) and any(
        word in str(error).lower() for word in ("connection", "gloo", "nccl", "timed out", "socket", "broken pipe")
    )


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[-1] or type(error).__name__
