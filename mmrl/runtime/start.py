"""Train a recipe into a run directory: in this process, or in processes that ``mmrl.runtime.ray_driver`` starts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mmrl.app.divergence import settle
from mmrl.app.resume import same_run
from mmrl.app.trainer import ANEW, Outcome, Trainer
from mmrl.config.loader import LoadedRecipe
from mmrl.config.masked_text import masked_override
from mmrl.config.schema import Recipe
from mmrl.core import checkpoint_reader as reader
from mmrl.core import notices
from mmrl.core.checkpoint_reader import Saved
from mmrl.core.errors import UserError
from mmrl.core.files import remove
from mmrl.core.plugins.user_code import short_path
from mmrl.core.secrets import remember
from mmrl.core.signals import Stop, stop_on_signal
from mmrl.inference.this_machine import choose_device
from mmrl.logging.rundir import ENDED, Ended, RunDir
from mmrl.logging.trackers import check_trackers
from mmrl.planner.plan import resolved
from mmrl.report.html import write_report
from mmrl.report.verdict import judge_run
from mmrl.rewards.last_words import left_by_last
from mmrl.runtime.ray_driver import launch
from mmrl.runtime.shipped import variables
from mmrl.runtime.warm_start import warmed
from mmrl.training.callbacks import AnyCallback, Callbacks


def train(
    loaded: LoadedRecipe,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[AnyCallback] = (),
) -> Path:
    """Run the recipe into the directory ``out`` (or continue it there) and return ``out``.

    ``callbacks`` are called in this process, or, of a run with several devices, in that of its leader, as copies.

    Raises ``UserError``, and ``SystemExit`` if SIGTERM or SIGHUP has stopped the run, after it is saved.
    """
    train_to_end(loaded, out, resume=resume, overwrite=overwrite, callbacks=callbacks)
    return out


def train_to_end(
    loaded: LoadedRecipe,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[AnyCallback] = (),
) -> bool:
    """``train``; returns whether the run came to its end (True), or Ctrl-C has stopped it (False)."""
    begun = warmed(loaded, out, lambda stage, to, on: train_to_end(stage, to, resume=on), overwrite=overwrite)
    if begun is None:
        return False
    loaded = begun
    with opened(loaded, out, resume=resume, overwrite=overwrite) as run:
        if run.recipe.controllers * run.recipe.devices_per_controller > 1:
            outcome = launch(run.loaded, run.directory, resume=resume, stop=run.stop, callbacks=callbacks)
            run.stop.reason = outcome.asked or run.stop.reason
        else:
            outcome = run.trainer(callbacks).begin(run.stop, run.found, resume=resume)
        run.conclude(outcome)
    return came_to_end(outcome, run.stop)


def came_to_end(outcome: Outcome, stop: Stop) -> bool:
    """Whether the run came to its end; not where Ctrl-C stopped it. Raises ``SystemExit`` where another signal did."""
    if stop.exit_code and not outcome.finished:
        raise SystemExit(stop.exit_code)
    return outcome.finished


@dataclass(frozen=True)
class OpenRun:
    """A run whose directory is locked and contains its recipe; ``found``: the checkpoint that it continues from."""

    loaded: LoadedRecipe
    directory: RunDir
    stop: Stop
    found: Saved | None
    launcher: Callable[[str], str] = str
    """What makes of a command of ``mmrl`` the one that starts all processes of the run."""

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    def trainer(self, callbacks: Sequence[AnyCallback]) -> Trainer:
        """Load everything that a step needs, to train in this process."""
        called = Callbacks(callbacks, self.recipe, self.directory.path, self.stop) if callbacks else None
        return Trainer(self.loaded, self.directory, callbacks=called)

    def ended(self, outcome: Outcome) -> Ended:
        """How the run ended, for its directory."""
        if outcome.error:
            return Ended("failed", outcome.done, outcome.error.partition("\n")[0])
        if outcome.finished:
            return outcome.end or Ended("finished", outcome.done)
        return Ended("stopped", outcome.done, self.stop.why)

    def conclude(self, outcome: Outcome) -> None:
        """Keep how the run ended, write its report, and print how to continue it. Raises ``UserError`` if an error
        ended it."""
        again = self.launcher(command(self.loaded, self.directory.path))
        self.ended(outcome).write(self.directory.path)
        if outcome.divergence is not None:
            raise UserError(settle(self.directory, outcome.divergence, self.recipe, again))
        if outcome.error:
            saved = f"steps up to {outcome.saved} are saved; fix it, then: {resumed(self.loaded, again)}"
            if not outcome.saved:
                saved = f"no step is saved; fix it, then: {anew(self.loaded, again)}"
            error = UserError(f"{outcome.error}\n{saved}")
            error.exit_code = outcome.exit_code
            raise error
        if outcome.finished:
            finish(self.directory, outcome)
            return
        if outcome.save_failed:
            raise UserError(outcome.save_failed)
        why = f" ({self.stop.reason})" if self.stop.reason else ""
        print(f"stopped after step {outcome.done}{why}; continue with: {resumed(self.loaded, again)}", file=sys.stderr)
        try:
            notices.note(f"report: {short_path(str(write_report(self.directory.path)))}")
        except (UserError, OSError) as error:  # the run is saved, and its exit code says how it was stopped
            print(f"warning: no report was written: {error}", file=sys.stderr)


@contextmanager
def opened(loaded: LoadedRecipe, out: Path, *, resume: bool, overwrite: bool) -> Generator[OpenRun]:
    """Create or take over the directory ``out``, and keep it locked inside the block. Raises ``UserError``."""
    loaded = resolved(loaded.for_resume(out) if resume else loaded)
    check_trackers(loaded.recipe.log)
    if loaded.recipe.controllers * loaded.recipe.devices_per_controller == 1:
        choose_device(loaded.recipe.device)  # before a folder is made; with several, it is another process that has it
    remember(variables(loaded.recipe))
    with RunDir.create(out, overwrite=overwrite, resume=resume) as directory, stop_on_signal() as stop:
        if names := left_by_last(directory.path):
            print(
                f"warning: the last process of this run ended in a call of the reward {' or '.join(names)}: it was "
                "killed there, or the reward ended it (a crash, os._exit, too much memory)",
                file=sys.stderr,
            )
        if resume and loaded.continues is None and directory.resolved.exists():  # one killed at once has no recipe yet
            same_run(directory, loaded)
        found = reader.newest(directory.checkpoints, ANEW) if resume else None  # before anything is written
        remove(directory.path / ENDED)
        if loaded.continues is None:
            directory.write_recipe(loaded.paths, loaded.overrides, loaded.resolved())
        else:
            for note in loaded.continues.notes:
                notices.note(note)
            directory.write_continued(loaded.continues, loaded.resolved())
        directory.write_environment()
        yield OpenRun(loaded, directory, stop, found)


def command(loaded: LoadedRecipe, out: Path) -> str:
    """The command line that trains this recipe into ``out``, without its secrets."""
    place = short_path(str(out))
    if loaded.continues is not None:
        return shlex.join(["mmrl", "continue", place])
    overrides = [masked_override(text, loaded.tree.values) for text in loaded.overrides]
    words = ["mmrl", "train", *map(str, loaded.paths), *overrides, "--out", place]
    return shlex.join(words)


def resumed(loaded: LoadedRecipe, again: str) -> str:
    """How to continue the run: with the command ``again``, or from Python if its recipe was made there."""
    if loaded.continues is not None:
        return f"mmrl.continue_run({str(loaded.continues.run)!r}, ...)" if loaded.from_python else again
    return "the same call of mmrl.train with resume=True" if loaded.from_python else f"{again} --resume"


def anew(loaded: LoadedRecipe, again: str) -> str:
    """How to start a run again that has no step; only a start from the beginning takes an edited recipe."""
    if loaded.continues is not None:
        return resumed(loaded, again)
    if loaded.from_python:
        return "the same call of mmrl.train with overwrite=True (or resume=True, if its arguments stay the same)"
    return f"{again} --overwrite (or --resume, if the recipe stays the same)"


def finish(directory: RunDir, outcome: Outcome) -> None:
    """Write the report, and say whether the run learned; raise ``UserError`` if the last checkpoint could not be
    saved."""
    judged = judge_run(directory.path)
    report = short_path(str(write_report(directory.path, judged)))
    notices.note("\n".join(judged.lines()))
    notices.note(f"done: {outcome.done} steps, {outcome.cpu_seconds:.0f} CPU-seconds of training; report: {report}")
    if outcome.save_failed:
        raise UserError(outcome.save_failed)
