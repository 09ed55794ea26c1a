"""The keys that a recipe may leave to the plan (``auto``, or no value), which chooses them for a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mmrl.config.schema import Recipe
from mmrl.core.json_types import Json
from mmrl.core.stored import object_if_whole

KEYS = (
    *("train.micro_batch_size", "train.micro_batch_tokens", "sampling.batch_size"),
    *("model.gradient_checkpointing", "model.offload", "performance.compile"),
)


def left_open(recipe: Recipe) -> list[str]:
    """Those of ``KEYS`` that nothing has set."""
    split = [(key, *key.split(".")) for key in KEYS]
    return [key for key, section, name in split if name in getattr(recipe, section).open_keys]


def with_values(recipe: Recipe, values: Mapping[str, Json]) -> Recipe:
    """``recipe`` with ``values`` by key, such as ``train.micro_batch_size``; they are then no longer open."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        changed = getattr(recipe, section).model_copy(update={name: value})
        recipe = recipe.model_copy(update={section: changed})
    return recipe


def value_of(recipe: Recipe, key: str) -> Json:
    """The value of ``recipe`` at ``key``, such as ``train.micro_batch_size``."""
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


def chosen_before(recipe: Recipe, run: Path) -> dict[str, Json]:
    """What the run in the directory ``run`` chose for the keys that ``recipe`` leaves open; nothing where there is no
    run, or a damaged one."""
    stored = object_if_whole(run / "resolved.json")
    found = dict[str, Json]()
    for key in left_open(recipe):
        section, _, name = key.partition(".")
        of = stored.get(section)
        if isinstance(of, Mapping) and name in of:
            found[key] = of[name]
    return found
