"""Train the run that comes first (``warm_start``), and begin the other one with its weights."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mmrl.app.export import export
from mmrl.app.resume import same_run
from mmrl.config.loader import LoadedRecipe
from mmrl.config.model import Lora
from mmrl.config.schema import Recipe
from mmrl.config.warm_start import first_stage
from mmrl.core.errors import UserError, refuse
from mmrl.core.json_types import as_object
from mmrl.core.plugins.user_code import short_path
from mmrl.logging.rundir import RunDir, looks_like_run
from mmrl.planner.plan import plan


def warmed(
    loaded: LoadedRecipe, out: Path, train: Callable[[LoadedRecipe, Path, bool], bool], *, overwrite: bool
) -> LoadedRecipe | None:
    """``loaded`` with the weights of its first stage, which ``train`` trains (recipe, directory, whether to resume;
    whether it came to its end). None where it was stopped.

    The stage has a directory beside ``out``, ``OUT-warm``, with its weights in ``OUT-warm/weights``. What is there
    already is used again, but for ``overwrite``. Raises ``UserError`` where the stage cannot run.
    """
    recipe = loaded.recipe
    if recipe.warm_start is None:
        return loaded
    folder = out.with_name(f"{out.name}-warm")
    weights = folder / "weights"
    stage = first_stage(loaded, recipe.warm_start)
    if overwrite and looks_like_run(folder):
        shutil.rmtree(folder)
    if weights.is_dir():
        _same(stage.for_resume(folder), folder)
        print(f"warm start: {short_path(str(folder))} is there, and its weights are used again", file=sys.stderr)
    else:
        planned = plan(stage)
        refuse(planned.problems, "the run that comes first (warm_start) cannot run here")
        print(f"warm start: {stage.recipe.train.steps} steps in {short_path(str(folder))}", file=sys.stderr)
        stage = replace(stage, recipe=planned.recipe, planned=planned.of_a_step)
        if not train(stage, folder, looks_like_run(folder)):
            print("stopped in the warm start; the same command goes on with it", file=sys.stderr)
            return None
        export(folder, weights, "merged" if recipe.model.lora is None else "lora")
    return replace(loaded, recipe=_beginning_with(recipe, weights.resolve()))


def _same(stage: LoadedRecipe, folder: Path) -> None:
    """Raise ``UserError`` where the run in ``folder`` is of another recipe."""
    edit = f"add --overwrite to train it anew, or keep it and take another --out; it lies in {folder}"
    try:
        same_run(RunDir(folder), stage)
    except UserError as error:
        raise UserError(f"warm_start: {str(error).removeprefix('--resume: ')}; {edit}") from error
    limits = ("steps", "max_cpu_seconds")  # which a run that goes on may change
    before = as_object(RunDir(folder).settings()["train"])
    if changed := [key for key in limits if before.get(key) != getattr(stage.recipe.train, key)]:
        names = ", ".join(f"train.{key}" for key in changed)
        raise UserError(f"warm_start: {names} differ from those of the run that is there; {edit}")


def _beginning_with(recipe: Recipe, weights: Path) -> Recipe:
    model = recipe.model
    if model.lora is None:
        model = model.model_copy(update={"path": str(weights)})
    else:
        lora = Lora.model_validate(
            {"path": str(weights), "init": model.lora.init}
        )  # rank and targets are the adapter's
        model = model.model_copy(update={"lora": lora})
    return recipe.model_copy(update={"model": model, "warm_start": None})
