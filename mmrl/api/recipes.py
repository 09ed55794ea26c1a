"""Read a recipe that is given as a name, a path, a mapping or a ``Recipe``, with changes and Python objects in it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, cast

from mmrl.api.data import AnyData, Data
from mmrl.app.continuing import Choice, continued
from mmrl.config.loader import LoadedRecipe, load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.plugins.python_objects import in_this_process, name_of
from mmrl.planner.gpus import Gpu, planned_for

AnyRecipe: TypeAlias = "str | os.PathLike[str] | Mapping[str, Json] | Recipe"
Changes: TypeAlias = "Mapping[str, Json] | Sequence[str]"
AnyAlgorithm: TypeAlias = "type | str | Mapping[str, object]"
"""A class with settings, the name of an algorithm, or a mapping with one of them as ``type`` and the settings."""
AnyEnvironment: TypeAlias = object
"""A name, a class, a function that the model can call, a list of such functions, or a mapping with one as ``name``."""
AnyReward: TypeAlias = object
"""A name, a function, a class, an object with a method ``score``, or a mapping with one of them as ``name``."""


@dataclass(frozen=True)
class Objects:
    """What a recipe takes from Python in place of names: see ``mmrl.train``."""

    rewards: Sequence[AnyReward] | None = None
    eval_rewards: Sequence[AnyReward] | None = None
    data: AnyData | None = None
    heldout: AnyData | None = None
    algorithm: object = None
    environment: AnyEnvironment | None = None

    def changes(self) -> dict[str, Json]:
        """The keys of a recipe that they set. Raises ``UserError``."""
        changes: dict[str, Json] = {}
        taken: dict[str, None] = {}
        for key, rewards in (("rewards", self.rewards), ("eval.rewards", self.eval_rewards)):
            if rewards is not None:
                named = [_reward(reward, f"{key}[{i}]", taken) for i, reward in enumerate(_listed(rewards, key))]
                changes[key] = named
        if self.heldout is not None and self.data is None:
            raise UserError("heldout: give data too, or set data.heldout of the recipe")
        if self.data is not None:
            changes["data.name"] = name_of("datasets", Data(self.data, self.heldout).prompts, word="data")
            changes |= {"data.train": {}, "data.heldout": {}}
        if self.algorithm is not None:
            changes["algorithm"] = _algorithm(self.algorithm)
        if self.environment is not None:
            changes |= _environment(self.environment)
        return changes


@contextmanager
def read(
    recipe: AnyRecipe,
    changes: Changes | None = None,
    objects: Objects | None = None,
    gpu: Gpu | None = None,
    named: Callable[[str], object] | None = None,
) -> Generator[LoadedRecipe]:
    """The recipe, whose files exist inside the ``with`` only. Raises ``RecipeError`` and ``UserError``.

    ``gpu``: what ``model.dtype: auto`` is chosen for, in place of this machine's device. ``named``: called with the
    recipe's name before anything else in it is checked.
    """

    def prepare(values: JsonObject) -> JsonObject:
        if named is not None and isinstance(name := values.get("name"), str):
            named(name)
        return values if gpu is None else planned_for(gpu, values)

    with tempfile.TemporaryDirectory(prefix="mmrl-") as folder:
        paths, root = _files(recipe, Path(folder))
        overlays, overrides = _layers(changes, objects, Path(folder))
        loaded = load_recipe([*paths, *overlays], overrides, prepare, root)
        held = _held(loaded.recipe)
        yield replace(loaded, from_python=bool(root or overlays or held))


@contextmanager
def stored(run: Path, changes: Changes | None, objects: Objects, choice: Choice | None) -> Generator[LoadedRecipe]:
    """The recipe with which the run in the directory ``run`` goes on; as ``read``."""
    with tempfile.TemporaryDirectory(prefix="mmrl-") as folder:
        overlays, overrides = _layers(changes, objects, Path(folder))
        loaded = continued(run, overlays, overrides, choice)
        yield replace(loaded, from_python=bool(_held(loaded.recipe)))


def _layers(changes: Changes | None, objects: Objects | None, folder: Path) -> tuple[list[Path], list[str]]:
    """Files to layer over a recipe, and single settings."""
    given = (objects or Objects()).changes()
    chosen = given.get("algorithm")
    if isinstance(chosen, dict) and isinstance(changes, Mapping):  # its settings, beside the class
        more = changes.get("algorithm")
        if isinstance(more, Mapping) and "type" in more:
            raise UserError("algorithm: changes name another one; give it in one place")
        if isinstance(more, Mapping):
            given["algorithm"] = {**chosen, **more}
            changes = {key: value for key, value in changes.items() if key != "algorithm"}
    overlays, own = _changes(changes or {}, folder)
    overrides = [_override(key, value) for key, value in given.items()]
    return overlays, [*overrides, *own]  # so that algorithm.clip_range is of the algorithm that was given


def _held(recipe: Recipe) -> list[str]:
    """The keys with an object of this process. Raises ``UserError`` where other processes would need it."""
    held = [f"{key} ({name})" for key, name in _names(recipe) if in_this_process(name)]
    if held and recipe.controllers * recipe.devices_per_controller > 1:
        raise UserError(
            f"{', '.join(held)}: this object exists in this process only, and controllers or "
            "devices_per_controller above 1 train in others; define it at the top of a file other than the script "
            "and import it from there, or give path/to/file.py:name"
        )
    return held


def _algorithm(given: object) -> Json:
    """The section of a class, a name, or a mapping with one of them as its ``type``. Raises ``UserError``."""
    section: dict[str, object] = dict(given) if isinstance(given, Mapping) else {"type": given}
    kind = section.get("type")
    if isinstance(kind, type):
        kind = name_of("algorithms", kind)
    if not isinstance(kind, str):
        what = f"{kind!r} is no class and no name" if "type" in section else "the mapping has no type"
        raise UserError(
            f"algorithm: {what}; write algorithm=MyClass, algorithm='grpo', or algorithm={{'type': 'grpo', "
            "'clip_high': 0.28}; settings alone go into changes"
        )
    return cast("Json", {**section, "type": kind})


def _environment(given: AnyEnvironment) -> dict[str, Json]:
    """The keys of what the policy acts in; the recipe's limits stay. Raises ``UserError``."""
    section: dict[str, object] = dict(given) if isinstance(given, Mapping) else {"name": given}
    named = section.get("name")
    taken: dict[str, None] = {}
    if isinstance(named, Sequence) and not isinstance(named, str):
        tools = [_acted_in(tool, taken) for tool in named]
        options = section.get("options") or {}
        section = {**section, "name": "tools", "options": {**cast("dict[str, object]", options), "tools": tools}}
    else:
        section["name"] = _acted_in(named, taken)
    section.setdefault("options", {})
    return {f"environment.{key}": cast("Json", value) for key, value in section.items()}


def _acted_in(value: object, taken: dict[str, None]) -> str:
    if isinstance(value, str):
        return value
    if not callable(value):
        raise UserError(
            f"environment: {value!r} is neither a name, a class nor a function; give environment=MyClass, a function "
            "with types and a docstring, or a list of such functions"
        )
    name = name_of("environments", value, taken)
    taken[name] = None
    return name


def _files(recipe: object, folder: Path) -> tuple[list[Path | str], Path | None]:
    """The recipe as a file, and the folder where its relative paths start if not the file's."""
    if isinstance(recipe, str | os.PathLike):
        return [os.fspath(recipe)], None
    if isinstance(recipe, Recipe):
        recipe = recipe.model_dump(mode="json")
    if not isinstance(recipe, Mapping):
        raise UserError(f"recipe: {recipe!r} is neither a name, a path, a mapping nor a mmrl.Recipe")
    file = folder / "recipe.yaml"
    file.write_text(_json("the recipe", recipe, 1), encoding="utf-8")
    return [file], Path.cwd()


def _changes(changes: Changes, folder: Path) -> tuple[list[Path], list[str]]:
    """As files to layer over a recipe, and ``a.b=c``. A mapping inside merges, as a file does."""
    if isinstance(changes, str):
        raise UserError(f"changes: {changes!r} is one text; write [{changes!r}], or a mapping")
    if not isinstance(changes, Mapping):
        return [Path(text) for text in changes if _is_file(text)], [text for text in changes if not _is_file(text)]
    merged = {key: value for key, value in changes.items() if isinstance(value, Mapping) and key.isidentifier()}
    file = folder / "changes.yaml"
    if merged:
        file.write_text(_json("changes", merged, 1), encoding="utf-8")
    return [file] if merged else [], [_override(key, v) for key, v in changes.items() if key not in merged]


def _is_file(text: str) -> bool:
    return "=" not in text or os.path.isfile(text)


def _override(key: str, value: Json) -> str:
    return f"{key}={_json(key, value)}"


def _json(key: str, value: object, indent: int | None = None) -> str:
    """``value`` as JSON, which is YAML too. Raises ``UserError``."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain, indent=indent)
    except (TypeError, ValueError) as error:
        raise UserError(f"{key}: {error}; a recipe holds texts, numbers, lists and mappings") from None


def _plain(value: object) -> Json:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a {type(value).__name__} cannot stand in a recipe")


def _listed(rewards: object, key: str) -> Sequence[AnyReward]:
    if isinstance(rewards, str | Mapping) or not isinstance(rewards, Sequence):
        raise UserError(f"{key}: give a list, [{rewards!r}]")
    return rewards


def _reward(reward: AnyReward, key: str, taken: dict[str, None]) -> Json:
    """A reward as a recipe holds it. Raises ``UserError``."""
    if isinstance(reward, Mapping):
        if "name" not in reward:
            raise UserError(f"{key}: the mapping has no name; write {{'name': my_reward, 'weight': 1.0}}")
        return {**reward, "name": _named(reward["name"], key, taken)}
    return {"name": _named(reward, key, taken)}


def _named(reward: object, key: str, taken: dict[str, None]) -> str:
    if isinstance(reward, str):
        return reward
    if not callable(reward) and not callable(getattr(reward, "score", None)):
        raise UserError(
            f"{key}: a {type(reward).__name__} is no reward; give a name, a function score(samples, *, context), or an "
            "object with such a method"
        )
    name = name_of("rewards", reward, taken)
    taken[name] = None
    return name


def _names(recipe: Recipe) -> list[tuple[str, str]]:
    """The keys of a recipe that may hold a Python object, and the names there."""
    rewards = [(f"rewards[{i}]", reward.name) for i, reward in enumerate(recipe.rewards)]
    rewards += [(f"eval.rewards[{i}]", reward.name) for i, reward in enumerate(recipe.eval.rewards)]
    world = recipe.environment
    worlds = [] if world is None else [world.name, *map(str, world.options.get("tools") or ())]
    found = [("data", recipe.data.name), ("algorithm", recipe.algorithm.type), *rewards]
    return [*found, *(("environment", name) for name in worlds)]
