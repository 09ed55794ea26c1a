"""Resolve the names in a recipe on this machine and check that they exist. Reads files without importing them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache
from glob import has_magic
from pathlib import Path
from typing import Any, Literal

from mmrl.config.data import MOST_SOURCES
from mmrl.config.drop_ins import declared_paths, missing_class, missing_drop_in, split_file
from mmrl.config.errors import KeyPath, Problem, RecipeError, did_you_mean, format_key
from mmrl.config.layers import Tree, shown
from mmrl.config.section import MOST_REWARDS
from mmrl.config.teacher import MOST_TEACHERS
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject, value_at
from mmrl.core.packages import places
from mmrl.core.packages.table import PREFIX
from mmrl.core.plugins.loading import Kind, folders
from mmrl.core.stored import object_if_whole

_HUB_LIKE = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_DATA = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MODEL_FILES = ("model_index.json", "config.json", "adapter_config.json")


def shipped_recipes() -> dict[str, Path]:
    """The recipes of this installation by name; a second one with the same name is called ``folder/name``."""
    found: dict[str, Path] = {}
    for root in folders("pipelines"):
        for file in sorted(root.glob("*/recipes/*.yaml")):
            name = file.stem
            found[f"{file.parent.parent.name}/{name}" if name in found else name] = file
    return found


def find_recipe(text: str) -> Path:
    """The file that ``text`` (a path, or the name of a shipped recipe) means. Raises ``RecipeError``."""
    file = Path(os.path.expanduser(text))
    if os.path.isfile(file):
        return file
    shipped = shipped_recipes()
    if text in shipped:
        return shipped[text]
    for name, path in shipped.items():
        if text in (f"{path.parent.parent.name}/{name}", f"{name}.yaml"):
            return path
    if os.path.isdir(file):
        message = f"is a folder; name a recipe in it, as in {file / 'recipe.yaml'}"
        if (file / "resolved.json").is_file():
            message = f"is the folder of a run, which goes on with: mmrl continue {shlex.quote(text)}"
    else:
        listed = f"  (recipes: {', '.join(shipped)})" if shipped else ""
        message = f"there is no such file or recipe{did_you_mean(text, list(shipped))}{listed}"
    raise RecipeError([Problem(text, "", message)])


def resolve(root: Path, text: str) -> str:
    """The absolute path of the model or file that ``text`` names, or ``text`` itself if it names nothing local.

    Looked up in ``root`` (the recipe's folder), the current folder and the folders of the shipped recipes, so that a
    copied recipe still finds the files beside the original. ``my.py:name`` keeps its ``:name``. A text that may also be
    a hub name (``org/model``) is a path only if it leads to a model in the library's format, or to a file.
    ``package:NAME`` is the directory that ``mmrl fetch`` wrote, and itself where it is not set up.
    """
    if split_file(text)[0] is not None:
        return resolve_drop_in(root, text)
    if text.startswith(PREFIX):
        return places.found(text)
    found = _look_up(root, text) if text else None
    if found is None:
        return text
    if _HUB_LIKE.fullmatch(text) and found.is_dir() and not any((found / name).is_file() for name in _MODEL_FILES):
        return text
    return str(found)


def resolve_drop_in(root: Path, text: str) -> str:
    """The path of a drop-in or an algorithm, as ``resolve`` has it: ``my.py`` and ``my.py:name`` are files, all other
    texts are names.

    So a folder ``judge`` with a model does not hide the reward ``judge``.
    """
    file, attribute = split_file(text)
    found = None if file is None else _look_up(root, file)
    return text if found is None else f"{found}:{attribute}" if attribute else str(found)


def is_hub_data(name: str) -> bool:
    """Whether ``data.name`` is a data set on the hub (``org/name``), or a folder with such a name."""
    return split_file(name)[0] is None and _HUB_DATA.fullmatch(name) is not None


def resolve_options(root: Path, options: JsonObject, paths: Sequence[str]) -> JsonObject:
    """``options`` of a reward with those that it declares as ``paths`` (``"model"``, ``"model.path"``) resolved."""
    resolved = dict(options)
    for name in paths:
        key, _, inner = name.partition(".")
        value = resolved.get(key)
        if inner and isinstance(value, Mapping) and isinstance(path := value.get(inner), str):
            resolved[key] = {**value, inner: resolve(root, path)}
        elif not inner and isinstance(value, str):
            resolved[key] = resolve(root, value)
    return resolved


_Named = Kind | Literal["class", "model", "path", "file"]
"""What a key of a recipe names: a drop-in, a class in a file, a model, a place that may be elsewhere, or a file that
must be here."""


_OF_ENVIRONMENT = ("environment", "options")
_TOOLS = (*_OF_ENVIRONMENT, "tools")
"""The names of the functions that a model can call."""
_DRAW = "draw"
"""The environment whose option ``model`` is one that draws."""
_REVISE = "revise"
"""The environment whose options name a reward."""


def _named(values: JsonObject) -> Iterator[tuple[_Named, KeyPath, Any]]:
    """What a recipe may name: the kind, the path of the section, and the key there."""
    yield "model", ("model",), "path"
    yield "file", ("model", "lora"), "path"
    for teacher in (("teacher",), *_items(values, ("teacher",), MOST_TEACHERS)):
        yield "model", teacher, "model"
    yield "file", (), "architecture"
    yield "class", ("rollout",), "engine"
    yield "class", ("data",), "sampler"
    yield "class", ("data", "sampler"), "name"
    yield "pipelines", (), "pipeline"
    yield "algorithms", ("algorithm",), "type"
    for source in (("data",), *_items(values, ("data", "mixture"), MOST_SOURCES)):
        yield "datasets", source, "name"
        for split in ("train", "heldout"):
            yield "path", (*source, split), "path"
            if split_file(_text(values, (*source, split, "taskset")))[0] is not None:  # else a package's name
                yield "path", (*source, split), "taskset"
    yield "environments", ("environment",), "name"
    yield "class", ("environment",), "calls"
    if _text(values, ("environment", "name")) == _DRAW:
        yield "model", ("environment", "options"), "model"
    for *path, last in _items(values, _TOOLS, MOST_REWARDS):
        yield "environments", tuple(path), last
    if _text(values, ("environment", "name")) == _REVISE:
        yield "rewards", _OF_ENVIRONMENT, "reward"
    for reward in _rewards(values):
        yield "rewards", reward, "name"


def located(root: Path, values: JsonObject) -> JsonObject:
    """``values`` of a recipe with the absolute paths of all files and folders that they name: nothing that reads the
    recipe looks a name up again."""
    found = deepcopy(dict(values))
    for kind, path, key in _named(values):
        text, section = _text(values, (*path, key)), value_at(found, path)
        if not text or not isinstance(section, dict | list):
            continue
        if kind == "file":
            section[key] = str(_look_up(root, text) or text)
        elif kind in ("model", "path"):
            with suppress(UserError):  # of a package that does not exist: ``missing_names`` says it, with its key
                section[key] = resolve(root, text)
        elif kind != "class" or split_file(text)[1]:
            section[key] = resolve_drop_in(root, text)
        if isinstance(section, dict) and kind == "rewards" and isinstance(options := section.get("options"), Mapping):
            section["options"] = resolve_options(root, options, declared_paths(_text(section, (key,))))
    return found


def missing_names(tree: Tree, root: Path) -> Iterator[tuple[KeyPath, str]]:
    """Every name in the recipe that does not exist, as ``(key, what is wrong and what to write)``."""
    for kind, path, key in _named(tree.values):
        name = _text(tree.values, (*path, key))
        if name and (wrong := _missing(kind, key, name, root)):
            yield (*path, key), wrong


def refuse_moved(run: Path) -> None:
    """Raise ``UserError`` where the run in the directory ``run`` cannot go on, because a file or folder that it names
    is no more where it was. Nothing records the content of these, so that another path may be another run."""
    values = object_if_whole(run / "resolved.json")  # of a damaged one whoever reads it next says so
    absent = {
        format_key(key): file
        for key, file in _places(values)
        if os.path.isabs(file) and not os.path.exists(file) and not has_magic(file)
    }
    if absent:
        edits = " ".join(shlex.quote(f"{key}=NEW") for key in absent)
        raise UserError(
            f"{', '.join(f'{key}: there is no {file!r}' for key, file in absent.items())} any more, and a run goes on "
            "with its own paths alone. Put the file or folder back there (itself, no link to it), or start a new "
            f"run: mmrl train {shlex.quote(str(run / 'resolved.json'))} {edits} --out OTHER"
        )


def refuse_code_inside(run: Path, values: Json) -> None:
    """Raise ``UserError`` where ``values``, the stored recipe of the run in the directory ``run``, name Python code of
    that directory, or code by a path that depends on the current folder. A run may be a stranger's; mmrl itself stores
    neither."""
    root, waiting = Path(os.path.realpath(run)), [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, str) and (file := split_file(value)[0]) and "\0" not in file:
            places = [path for path in (Path(file), run / file) if os.path.exists(path)]
            own = any(root in (*path.absolute().parents, *path.resolve().parents) for path in places)
            if own or (places and not os.path.isabs(file)):
                raise UserError(
                    f"the recipe of the run {run} names the code {file!r}, which lies in the run and may be anybody's; "
                    f"read it; if it is yours, move it elsewhere and name its new place in {run / 'resolved.json'}"
                )


def _places(values: JsonObject) -> Iterator[tuple[KeyPath, str]]:
    """The keys of a run's stored recipe that may not change, with the files and folders that they name."""
    for _, path, key in _named(values):
        name = _text(values, (*path, key))
        if (path or key)[0] != "eval" and key != "architecture":
            yield (*path, key), split_file(name)[0] or name
    for path in _items(values, ("rewards",), MOST_REWARDS):
        for name in declared_paths(_text(values, (*path, "name"))):
            key = (*path, "options", *name.split("."))
            yield key, _text(values, key)


def _missing(kind: _Named, key: str, name: str, root: Path) -> str:
    """What is wrong with one name; empty where it exists, or where what reads it reports it."""
    file, attribute = split_file(name)
    match kind:
        case "model":
            return missing_model(root, name)
        case "file":
            what = "file " if key == "architecture" else ""
            return "" if _look_up(root, name) else f"there is no {what}{name!r} ({_looked(root)}); correct the path"
        case "class":
            return missing_class(resolve_drop_in(root, name), _looked(root)) if file and attribute else ""
        case "path":
            return ""
        case _:
            if (kind == "datasets" and is_hub_data(name)) or (kind == "algorithms" and file is None):
                return ""
            return missing_drop_in(kind, resolve_drop_in(root, name), _looked(root))


def missing_model(root: Path, text: str) -> str:
    """What is wrong with the path of a model; empty where it exists, or may be a name on the hub or of a package."""
    if text.startswith(PREFIX):
        try:
            places.network_of(text)
        except UserError as error:
            return str(error)
        return ""
    first = Path(text).parts[:1]
    local = (
        text.startswith((".", "/", "~", "\\"))
        or not _HUB_LIKE.fullmatch(text)
        or bool(first and "/" in text and _look_up(root, first[0]))
    )
    if not local or _look_up(root, text) is not None:
        return ""
    return f"there is no {text!r} ({_looked(root)}); correct the path, or name a model of the hub (org/name)"


def _looked(root: Path) -> str:
    here = shown(root)
    return "looked in the current folder" if here == "." else f"looked in {here} and the current folder"


def _look_up(root: Path, text: str) -> Path | None:
    path = os.path.expanduser(text)
    folders = [root, Path.cwd(), *_shipped_folders()]
    # os.path answers False where Path raises: names too long, null bytes, an unknown ~user
    return next((found.resolve() for folder in folders if os.path.exists(found := folder / path)), None)


@cache
def _shipped_folders() -> tuple[Path, ...]:
    return tuple(dict.fromkeys(path.parent for path in shipped_recipes().values()))


def _rewards(values: JsonObject) -> list[KeyPath]:
    """The keys of the rewards; those past the limit are refused by the recipe's check."""
    return [key for path in (("rewards",), ("eval", "rewards")) for key in _items(values, path, MOST_REWARDS)]


def _items(values: JsonObject, path: KeyPath, most: int) -> list[KeyPath]:
    listed = value_at(values, path)
    return [(*path, i) for i in range(min(len(listed), most) if isinstance(listed, list) else 0)]


def _text(values: Json, path: KeyPath) -> str:
    found = value_at(values, path)
    return found if isinstance(found, str) else ""
