"""``mmrl.train``, ``mmrl.start``, ``mmrl.plan``: train and plan a recipe from Python."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from mmrl.api import run as runs
from mmrl.api.data import AnyData
from mmrl.api.entry import entry_point, step_of_run
from mmrl.api.recipes import AnyAlgorithm, AnyEnvironment, AnyRecipe, AnyReward, Changes, Objects, read, stored
from mmrl.api.run import Run
from mmrl.config.loader import LoadedRecipe
from mmrl.core.errors import UserError, refuse
from mmrl.core.garbage import rarely_collected
from mmrl.core.notices import silenced, silent
from mmrl.planner.gpus import gpu_of
from mmrl.planner.plan import plan as make_plan
from mmrl.planner.plan_data import Plan
from mmrl.planner.render import render
from mmrl.runtime.launchers import launched
from mmrl.runtime.start import train as train_into
from mmrl.training.callbacks import AnyCallback


@entry_point
def train(
    recipe: AnyRecipe,
    changes: Changes | None = None,
    *,
    rewards: Sequence[AnyReward] | None = None,
    eval_rewards: Sequence[AnyReward] | None = None,
    data: AnyData | None = None,
    heldout: AnyData | None = None,
    algorithm: AnyAlgorithm | None = None,
    environment: AnyEnvironment | None = None,
    callbacks: Sequence[AnyCallback] = (),
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Train a recipe to its end, and return the run.

    ``recipe``: the name of a shipped recipe (``shapes-lora``), a path, a mapping, or a ``mmrl.Recipe``.
    ``changes``: settings on top of it, ``{"train.steps": 50}``, sections that merge, ``{"train": {"steps": 50}}`` (one
    with a ``type`` starts anew), or the arguments of ``mmrl train``, ``["train.steps=50"]``.
    ``rewards``: in place of the recipe's: names, functions ``score(samples, *, context)``, objects with such a method,
    or mappings ``{"name": function, "weight": 2}``. ``eval_rewards``: measured on held-out samples, never trained on.
    ``data``: prompts in place of the recipe's: a list of texts, of records or of ``mmrl.Prompt``, a Hugging Face data
    set, or a function ``prompts(split)``. ``heldout``: the held-out ones; without them a tenth of ``data`` is held out.
    ``algorithm``: in place of the recipe's section: a class with settings, a name, or a mapping ``{"type": "grpo",
    "clip_high": 0.28}``; ``changes`` sets single settings of it.
    ``environment``: what the policy acts in over several turns: a class, a function with types and a docstring that the
    model can call, a list of such functions, a name, or a mapping ``{"name": ..., "max_turns": 4}``.
    ``callbacks``: ``mmrl.Callback`` objects, or functions that are called after each step.
    ``out``: the directory of the run, ``runs/<name>`` by default. ``resume`` continues the run there, ``overwrite``
    removes it. ``quiet``: print warnings and errors alone, neither the plan nor progress, which go to stderr.

    Raises ``mmrl.UserError`` with what to change, and ``SystemExit`` after SIGTERM.
    """
    _refuse_launcher()
    objects = Objects(rewards, eval_rewards, data, heldout, algorithm, environment)
    directory = runs.placed(out, resume=resume, overwrite=overwrite)
    with silenced(quiet=quiet), rarely_collected(), read(recipe, changes, objects, named=directory) as loaded:
        return _trained(loaded, directory(loaded.recipe.name), callbacks, resume=resume, overwrite=overwrite)


@entry_point
def continue_run(
    run: Run | str | Path,
    changes: Changes | None = None,
    *,
    extend: bool = False,
    hold: bool = False,
    rewards: Sequence[AnyReward] | None = None,
    eval_rewards: Sequence[AnyReward] | None = None,
    data: AnyData | None = None,
    heldout: AnyData | None = None,
    algorithm: AnyAlgorithm | None = None,
    environment: AnyEnvironment | None = None,
    callbacks: Sequence[AnyCallback] = (),
    quiet: bool = False,
) -> Run:
    """Go on with a run from its directory alone, to its end, as ``mmrl continue`` does: after Ctrl-C, a kill, early
    stopping, a callback's stop, or its last step.

    ``changes``: ``{"train.steps": 200}`` trains more steps. Where ``optim.schedule`` depends on the length, ``extend``
    stretches the schedule over the new length, and ``hold`` keeps the last learning rate. ``{"optim.lr": 1e-5}`` goes
    on with another learning rate. Both stay recorded in the run. ``rewards``, ``eval_rewards``, ``data``, ``heldout``
    and ``algorithm``: the same objects as of ``mmrl.train``, where the run has some that exist in one process only.

    Raises ``mmrl.UserError`` with what may change, and ``SystemExit`` after SIGTERM.
    """
    _refuse_launcher()
    if extend and hold:
        raise UserError("extend and hold exclude each other; give one of them")
    path = run.path if isinstance(run, Run) else Path(run)
    objects = Objects(rewards, eval_rewards, data, heldout, algorithm, environment)
    choice = "extend" if extend else "hold" if hold else None
    with silenced(quiet=quiet), rarely_collected(), stored(path, changes, objects, choice) as loaded:
        return _trained(loaded, path, callbacks, resume=True)


def _trained(
    loaded: LoadedRecipe, path: Path, callbacks: Sequence[AnyCallback], *, resume: bool, overwrite: bool = False
) -> Run:
    """Plan the recipe and train it to its end. Raises ``UserError``."""
    planned = make_plan(loaded.for_resume(path) if resume else loaded)
    if not silent():
        render(planned, Console(file=sys.stderr, highlight=False), short=True)
    refuse(planned.problems, "this recipe cannot run here")
    loaded = replace(loaded, recipe=planned.recipe, planned=planned.of_a_step)
    train_into(loaded, path, resume=resume, overwrite=overwrite, callbacks=callbacks)
    return Run(path, planned.recipe)


@step_of_run
def start(
    recipe: AnyRecipe,
    changes: Changes | None = None,
    *,
    rewards: Sequence[AnyReward] | None = None,
    eval_rewards: Sequence[AnyReward] | None = None,
    data: AnyData | None = None,
    heldout: AnyData | None = None,
    algorithm: AnyAlgorithm | None = None,
    environment: AnyEnvironment | None = None,
    callbacks: Sequence[AnyCallback] = (),
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Load a recipe and return its run before the first step, for a loop of your own. Arguments as of ``mmrl.train``.

        with mmrl.start("shapes-lora", out="runs/x") as run:
            while not run.finished:
                metrics = run.step()

    Raises ``mmrl.UserError``.
    """
    _refuse_launcher()
    objects = Objects(rewards, eval_rewards, data, heldout, algorithm, environment)
    path = None if out is None else Path(out)
    return runs.start(recipe, changes, objects, path, callbacks, resume=resume, overwrite=overwrite, quiet=quiet)


def _refuse_launcher() -> None:
    """Raise ``UserError`` in a process of torchrun or Slurm, where each process would train the whole recipe alone."""
    found = launched(os.environ)
    if found is not None:
        raise UserError(
            f"{found.launcher} has started {found.size} processes, and from Python each would train the recipe for "
            f"itself; start it with the command: {found.command('mmrl train RECIPE')}"
        )


@dataclass(frozen=True)
class Planned:
    """A plan: ``print`` shows it as ``mmrl plan`` does. ``problems``: why the recipe cannot run; empty if it can."""

    plan: Plan

    @property
    def problems(self) -> list[str]:
        return self.plan.problems

    def __str__(self) -> str:
        text = io.StringIO()
        render(self.plan, Console(file=text, width=100, highlight=False))
        return text.getvalue()

    __repr__ = __str__


@entry_point
def plan(
    recipe: AnyRecipe,
    changes: Changes | None = None,
    *,
    rewards: Sequence[AnyReward] | None = None,
    eval_rewards: Sequence[AnyReward] | None = None,
    data: AnyData | None = None,
    heldout: AnyData | None = None,
    algorithm: AnyAlgorithm | None = None,
    environment: AnyEnvironment | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
) -> Planned:
    """What a recipe would hold and do; loads no model. Arguments as of ``mmrl.train``.

    ``gpu``: plan for this GPU, which need not be here (``h100-80g``); ``gpus``: how many of it there are. Raises
    ``mmrl.UserError`` where the recipe cannot be read.
    """
    if gpus is not None and gpu is None:
        raise UserError("gpus says how many there are of gpu; add gpu='h100-80g', say")
    meant = gpu_of(gpu) if gpu else None
    objects = Objects(rewards, eval_rewards, data, heldout, algorithm, environment)
    with rarely_collected(), read(recipe, changes, objects, meant) as loaded:
        return Planned(make_plan(loaded, gpu=meant, gpus=gpus))
