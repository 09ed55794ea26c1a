"""Train a recipe into a run directory: in this process, or in processes that ``mmrl.runtime.launch`` starts."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from mmrl.checkpoint import reader
from mmrl.checkpoint.resume import same_run
from mmrl.config.loader import LoadedRecipe
from mmrl.config.masked_text import masked_override
from mmrl.errors import UserError
from mmrl.planner.plan import resolved
from mmrl.report.html import write_report
from mmrl.report.rundir import RunDir
from mmrl.report.trackers import check_trackers
from mmrl.runtime.launch import launch
from mmrl.session import ANEW, Outcome, Session
from mmrl.stopping import stop_on_signal
from mmrl.training.divergence import settle


def train(loaded: LoadedRecipe, out: Path, *, resume: bool = False, overwrite: bool = False) -> Path:
    """Run the recipe into the directory ``out`` (or go on where it stopped) and return it.

    Raises ``UserError``, and ``SystemExit`` where SIGTERM or SIGHUP has stopped it, once it is saved.
    """
    loaded = resolved(loaded.going_on(out) if resume else loaded)
    recipe = loaded.recipe
    check_trackers(recipe.log)
    with RunDir.create(out, overwrite=overwrite, resume=resume) as directory, stop_on_signal() as stop:
        if resume and directory.resolved.exists():  # a run killed in its first second has none yet
            same_run(directory, loaded)
        found = reader.newest(directory.checkpoints, ANEW) if resume else None  # before anything is written
        directory.write_recipe(loaded.paths, loaded.overrides, loaded.resolved())
        directory.write_environment()
        if recipe.controllers * recipe.devices_per_controller > 1:
            outcome = launch(loaded, directory, resume=resume, stop=stop)
        else:
            outcome = Session(loaded, directory).begin(stop, found, resume=resume)
        if outcome.divergence is not None:
            raise UserError(settle(directory, outcome.divergence, recipe, command(loaded, out)))
        if outcome.error:
            again = f"steps up to {outcome.saved} are saved; mend it, then: {command(loaded, out)} --resume"
            error = UserError(f"{outcome.error}\n{again}")
            error.exit_code = outcome.exit_code
            raise error
        if outcome.finished:
            finish(directory, outcome)
            return out
        if outcome.save_failed:
            raise UserError(outcome.save_failed)
        print(f"stopped after step {outcome.done}; continue with: {command(loaded, out)} --resume", file=sys.stderr)
    if stop.exit_code:
        raise SystemExit(stop.exit_code)
    return out


def command(loaded: LoadedRecipe, out: Path) -> str:
    """The command line that trains this recipe into ``out``, without its secrets."""
    overrides = [masked_override(text, loaded.tree.values) for text in loaded.overrides]
    words = ["mmrl", "train", *map(str, loaded.paths), *overrides, "--out", str(out)]
    return shlex.join(words)


def finish(directory: RunDir, outcome: Outcome) -> None:
    """Write the report; raise ``UserError`` where the last checkpoint could not be saved."""
    report = write_report(directory.path)
    print(
        f"done: {outcome.done} steps, {outcome.cpu_seconds:.0f} CPU-seconds of training; report: {report}",
        file=sys.stderr,
    )
    if outcome.save_failed:
        raise UserError(outcome.save_failed)
