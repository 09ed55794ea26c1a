"""The model of a recipe, as a reward's folder keeps it: the recipe without its secrets, and a hash of the weights.

A folder may come from somebody else, and a recipe may name Python files: a stored recipe names shipped parts only. One
that names anything else is refused before it is validated, since that imports the algorithm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from mmrl.config.drop_ins import split_file
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.hub_files import check_files
from mmrl.core.json_types import Json, JsonObject, as_object, as_text
from mmrl.core.packages.places import lacking
from mmrl.core.plugins.loading import Kind, names
from mmrl.core.plugins.python_objects import in_this_process
from mmrl.core.secrets import masked
from mmrl.core.untrusted import open_file, printable, shallow

_WHOLE = 64 << 20
"""A file of at most so many bytes is hashed in full; of a larger one its size, its beginning and its end."""
_ENDS = 1 << 20
_LORA = {"rank": 16, "alpha": 32}
"""The adapter of a model that writes, where the recipe has none; it has no effect until it is trained."""
_STEPS = {"steps": 1, "prompts_per_step": 2, "group_size": 2, "micro_batch_size": 4}
_SHIPPED: Mapping[tuple[str, str], Kind] = {
    ("", "pipeline"): "pipelines",
    ("algorithm", "type"): "algorithms",
    ("data", "name"): "datasets",
    ("mixture", "name"): "datasets",
    ("rewards", "name"): "rewards",
}
"""Keys that name a part of mmrl, each with the key of its section."""
_TEXT = ("system",)
"""Keys of text that is no name."""
_KEPT = (".json", ".safetensors", ".jinja", ".txt", ".model")


def described(recipe: Recipe) -> JsonObject:
    """The model of ``recipe`` as it is before training, to be read with in one process, in float32."""
    said = recipe.model_dump(mode="json")
    model = {**as_object(said["model"]), "dtype": "float32", "freeze": []}
    own = {"pipeline": recipe.pipeline, "model": model, "eval": {}}
    if recipe.makes == "text":  # no engine, no sharded weights, no data: what makes a chat of a prompt is enough
        said = {
            "name": said["name"],
            "pipeline": said["pipeline"],
            "sampling": said["sampling"],
            "data": {"name": "sums", "overlong": "cut"},
        }
        model["lora"] = model["lora"] or _LORA
        nothing = {"algorithm": {"type": "grpo"}, "train": _STEPS, "rewards": [{"name": "answer:exact"}]}
    else:
        said = {key: value for key, value in said.items() if key not in ("rollout", "architecture")}
        nothing = {"data": {"name": "shapes"}, "rewards": [{"name": "jpeg:compressibility"}]}
    kept = as_object(masked({**said, **own, **nothing}))  # rewards may have secrets among their options
    if wrong := next(_not_shipped(kept), None):
        raise UserError(f"{wrong}, and a stored model names parts of mmrl only; leave the model out")
    return kept


def stored(model: JsonObject) -> Recipe:
    """The recipe that ``described`` kept. Raises ``UserError`` for one that names code which is no part of mmrl, before
    any of it is imported, and ``ValueError`` for what is no recipe."""
    if not shallow(model):
        raise ValueError("it is nested too deeply")
    if wrong := next(_not_shipped(model), None):
        raise UserError(f"{wrong}, and a stored model names parts of mmrl only; do not use this folder")
    return Recipe.model_validate(model)


def _not_shipped(value: Json, path: tuple[str, ...] = ()) -> Iterator[str]:
    """What in a recipe names code that is no part of this installation."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if split_file(key)[0] is not None:
                yield f"the recipe names the file {printable(key)!r} ({'.'.join(path)})"
            yield from _not_shipped(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _not_shipped(inner, path)
    elif isinstance(value, str) and path:
        kind = _SHIPPED.get(("", *path)[-2:])  # pyright: ignore[reportArgumentType]
        if kind and value.partition(":")[0] not in names(kind):
            yield f"the recipe names the {kind[:-1]} {printable(value)!r} ({'.'.join(path)}), which mmrl does not ship"
        elif path[-1] not in _TEXT and (split_file(value)[0] is not None or in_this_process(value)):
            yield f"the recipe names the file {printable(value)!r} ({'.'.join(path)})"


def opened(model: JsonObject, what: str, again: str) -> tuple[Recipe, str]:
    """The recipe that ``described`` kept, and the place of its model. ``what`` the model does, and the command to run
    ``again``, are for messages. Raises ``UserError`` where the model is not there any more."""
    try:
        recipe = stored(model)
        path = as_text(as_object(model["model"])["path"])
    except UserError as error:
        raise UserError(f"the model that {what}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"the model that {what} is not known: {error}; run {again} again") from error
    if Path(path).is_absolute() and not Path(path).is_dir():
        raise UserError(f"the model that {what} is not at {path} any more; run {again} again")
    if unset := lacking(path):
        raise UserError(f"the model that {what}: {unset}")
    check_files(path)
    return recipe, path


def digest(path: str) -> str:
    """A hash of a model's files and of the names that they have in its folder; of a hub model its name."""
    folder = Path(path)
    if not folder.is_dir():
        return path
    found = hashlib.sha256()
    for file in sorted(p for p in folder.rglob("*") if p.suffix in _KEPT and p.is_file()):
        size = file.stat().st_size
        found.update(f"{file.relative_to(folder).as_posix()} {size}\n".encode())
        with open_file(file) as data:
            if size > _WHOLE:
                found.update(data.read(_ENDS))
                data.seek(-_ENDS, 2)
            found.update(data.read())
    return found.hexdigest()
