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
from mmrl.api.recipes import AnyRecipe, AnyReward, Changes, Objects, read
from mmrl.api.run import Run
from mmrl.callbacks import AnyCallback
from mmrl.errors import UserError
from mmrl.garbage import rarely_collected
from mmrl.planner.gpus import gpu_of
from mmrl.planner.plan import plan as make_plan
from mmrl.planner.plan_data import Plan
from mmrl.planner.render import render
from mmrl.runtime.launchers import launched
from mmrl.runtime.start import train as train_into


def train(
    recipe: AnyRecipe,
    changes: Changes | None = None,
    *,
    rewards: Sequence[AnyReward] | None = None,
    eval_rewards: Sequence[AnyReward] | None = None,
    data: AnyData | None = None,
    heldout: AnyData | None = None,
    algorithm: type | None = None,
    callbacks: Sequence[AnyCallback] = (),
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Run:
    """Train a recipe to its end, and return the run.

    ``recipe``: the name of a shipped recipe (``shapes-lora``), a path, a mapping, or a ``mmrl.Recipe``.
    ``changes``: settings on top of it, ``{"train.steps": 50}``, sections that merge, ``{"train": {"steps": 50}}``, or
    the arguments of ``mmrl train``, ``["train.steps=50"]``.
    ``rewards``: in place of the recipe's: names, functions ``score(samples, *, context)``, objects with such a method,
    or mappings ``{"name": function, "weight": 2}``. ``eval_rewards``: measured on held-out samples, never trained on.
    ``data``: prompts in place of the recipe's: a list of texts, of records or of ``mmrl.Prompt``, a Hugging Face data
    set, or a function ``prompts(split)``. ``heldout``: the held-out ones; without them a tenth of ``data`` is held out.
    ``algorithm``: a class with settings, as in ``algorithm.type: file.py:Class``; ``changes`` sets its settings.
    ``callbacks``: ``mmrl.Callback`` objects, or functions that are called after each step.
    ``out``: the directory of the run, ``runs/<name>`` by default. ``resume`` continues the run there, ``overwrite``
    removes it.

    Progress goes to stderr. Raises ``mmrl.UserError`` with what to change, and ``SystemExit`` after SIGTERM.
    """
    _refuse_launcher()
    objects = Objects(rewards, eval_rewards, data, heldout, algorithm)
    with rarely_collected(), read(recipe, changes, objects) as loaded:
        planned = make_plan(loaded)
        render(planned, Console(file=sys.stderr, highlight=False), short=True)
        if planned.problems:
            raise UserError("\n".join(["this recipe cannot run here", *planned.problems]))
        path = Path(out) if out is not None else Path("runs") / loaded.recipe.name
        train_into(
            replace(loaded, recipe=planned.recipe), path, resume=resume, overwrite=overwrite, callbacks=callbacks
        )
        return Run(path, planned.recipe)


def start(
    recipe: AnyRecipe,
    changes: Changes | None = None,
    *,
    rewards: Sequence[AnyReward] | None = None,
    eval_rewards: Sequence[AnyReward] | None = None,
    data: AnyData | None = None,
    heldout: AnyData | None = None,
    algorithm: type | None = None,
    callbacks: Sequence[AnyCallback] = (),
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Run:
    """Load a recipe and return its run before the first step, for a loop of your own. Arguments as of ``mmrl.train``.

        with mmrl.start("shapes-lora", out="runs/x") as run:
            while not run.finished:
                metrics = run.step()

    Raises ``mmrl.UserError``.
    """
    _refuse_launcher()
    objects = Objects(rewards, eval_rewards, data, heldout, algorithm)
    path = None if out is None else Path(out)
    return runs.start(recipe, changes, objects, path, callbacks, resume=resume, overwrite=overwrite)


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


def plan(
    recipe: AnyRecipe,
    changes: Changes | None = None,
    *,
    rewards: Sequence[AnyReward] | None = None,
    eval_rewards: Sequence[AnyReward] | None = None,
    data: AnyData | None = None,
    heldout: AnyData | None = None,
    algorithm: type | None = None,
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
    objects = Objects(rewards, eval_rewards, data, heldout, algorithm)
    with rarely_collected(), read(recipe, changes, objects, meant) as loaded:
        return Planned(make_plan(loaded, gpu=meant, gpus=gpus))
