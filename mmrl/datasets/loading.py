"""Load the prompts that a recipe names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mmrl
from mmrl.config.names import resolve, resolve_drop_in
from mmrl.config.schema import Recipe
from mmrl.datasets.records import BadRecord, Records, checked
from mmrl.errors import UserError
from mmrl.trajectory import Prompt


def load_prompts(recipe: Recipe, root: Path, split: str) -> Sequence[Prompt]:
    """The prompts of ``train`` or ``heldout``, as lazy as the data set makes them.

    Raises ``UserError`` for an empty or unusable data set, and past ``data.max_bad_fraction`` of bad records.
    """
    name = recipe.data.name if ":" in recipe.data.name else f"{recipe.data.name}:prompts"
    options = dict(getattr(recipe.data, split))
    if isinstance(options.get("path"), str):
        options["path"] = resolve(root, options["path"])
    try:
        made = mmrl.load("datasets", resolve_drop_in(root, name))(split, **options)
        prompts = made if isinstance(made, Sequence) else list(made)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"data.{split}: {name} cannot be called with {options}: {error}; change data.{split}"
        ) from error
    if not prompts:
        raise UserError(f"data.{split}: {name} gave no prompts for {options or 'its defaults'}; change data.{split}")
    bad = checked(prompts, recipe.data.max_bad_fraction)
    if recipe.sampling.type == "text" and recipe.sampling.system:
        return _with_system(prompts, recipe.sampling.system, bad)
    return prompts


def _with_system(prompts: Sequence[Prompt], system: str, bad: Sequence[BadRecord]) -> Sequence[Prompt]:
    """``prompts``, with the system message where they have none."""

    def get(i: int) -> Prompt:
        prompt = prompts[i]
        return prompt if prompt.system else replace(prompt, system=system)

    if isinstance(prompts, list):
        return [get(i) for i in range(len(prompts))]
    return Records(len(prompts), get, bad, getattr(prompts, "seen", 0))
