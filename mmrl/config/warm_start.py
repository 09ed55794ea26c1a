"""The run that comes first, from the section ``warm_start``: its recipe is the same one with these sections over it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from mmrl.config.errors import Finding, RecipeError, recipe_error
from mmrl.config.layers import parse_key
from mmrl.config.loader import LoadedRecipe, load_recipe
from mmrl.config.schema import WarmStart


def first_stage(loaded: LoadedRecipe, section: WarmStart) -> LoadedRecipe:
    """The recipe of the run that ``section`` of ``loaded`` asks for; its name ends in ``-warm``.

    Raises ``RecipeError``, whose keys begin with ``warm_start``.
    """
    values = {key: value for key, value in loaded.tree.values.items() if key != "warm_start"}
    over = section.model_dump(mode="json", exclude_unset=True)
    over |= {"rewards": section.rewards, "name": f"{loaded.recipe.name}-warm"}
    if loaded.recipe.sampling.type != "text":
        over["sampling"] = {"window": None} | section.sampling  # what only this recipe's own algorithm trains
    if not section.rewards:
        over["environment"] = None  # given answers are not acted on, and nothing sleeps
        if loaded.recipe.devices_per_controller == 1:
            over["placement"] = {"sleep": False}
    over |= {key: None for key in ("midway", "teacher") if getattr(loaded.recipe, key)}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("recipe.yaml", "warm_start.yaml")]
        for file, layer in zip(files, (values, over), strict=True):
            file.write_text(json.dumps(layer, ensure_ascii=False), encoding="utf-8")  # JSON is YAML, too
        try:
            made = load_recipe(files, root=loaded.root)
        except RecipeError as error:
            at = loaded.tree.source(("warm_start",))
            found = [Finding(at, ("warm_start", *(parse_key(one.key) or ())), one.message) for one in error.problems]
            raise recipe_error(found) from None
    return replace(made, paths=loaded.paths, overrides=loaded.overrides, from_python=loaded.from_python)


def problems_of_first_stage(loaded: LoadedRecipe) -> list[str]:
    """Why the run that comes first has no valid recipe; nothing where there is none, or it has one."""
    try:
        if loaded.recipe.warm_start is not None:
            first_stage(loaded, loaded.recipe.warm_start)
    except RecipeError as error:
        return [f"{one.key}: {one.message}" for one in error.problems]
    return []
