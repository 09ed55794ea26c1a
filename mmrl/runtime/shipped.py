"""What the controllers on a cluster get of the launcher's: files of the recipe, and environment variables it names."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mmrl
from mmrl.config.drop_ins import split_file
from mmrl.config.errors import format_key
from mmrl.config.loader import LoadedRecipe
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json
from mmrl.core.secrets import is_secret, leaves
from mmrl.core.sizes import size

MOST = 64 << 20
"""Bytes of files that are shipped; larger ones belong where all nodes see them."""
_NOT_READ = ("features", "architecture")
"""Keys whose paths no controller reads from the recipe's folder."""


@dataclass(frozen=True)
class Bundle:
    """Files by their path in the recipe's folder ``root``."""

    root: Path
    files: Mapping[str, bytes]


def variables(recipe: Recipe) -> dict[str, str]:
    """The variables of ``env`` with their values here. Raises ``UserError`` for one that is not set."""
    if lacking := [name for name in recipe.env if name not in os.environ]:
        raise UserError(
            f"env: {', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not set here, where the run starts; "
            f"set {'it' if len(lacking) == 1 else 'them'} (export {lacking[0]}=...), or remove the name from env"
        )
    return {name: os.environ[name] for name in recipe.env}


def ship(loaded: LoadedRecipe, actors: Sequence[Any], each: int, get: Callable[[Any], Any]) -> None:
    """Give controllers, of ``each`` actors, the files that their nodes do not see. ``get``: waits for an answer.

    Raises ``UserError`` for a file that cannot be shipped.
    """
    named = named_files(loaded)
    paths = [str(path) for path in named.values()]
    asked = {first: actors[first].lacks.remote(paths) for first in range(0, len(actors), each)}
    for first, ref in asked.items():
        node, lacks = get(ref)
        if lacks:
            given = bundle(loaded, {key: path for key, path in named.items() if str(path) in lacks}, node)
            for its in [actor.take.remote(given) for actor in actors[first : first + each]]:
                get(its)


def settings_and_secrets(given: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """``given`` in two parts: what Ray may write into its logs, and what it must not."""
    secrets = {name: value for name, value in given.items() if is_secret(name.lower(), value)}
    return {name: value for name, value in given.items() if name not in secrets}, secrets


def named_files(loaded: LoadedRecipe) -> dict[str, Path]:
    """The files and folders of the user's that the recipe names, by the key that names them."""
    ours = _ours()
    settings = {key: value for key, value in loaded.resolved().items() if key not in _NOT_READ}
    found = {}
    for key, _, text in leaves(settings):
        if not isinstance(text, str) or "\n" in text or len(text) >= 1000:
            continue
        path = Path(split_file(text)[0] or text)
        if path.is_absolute() and path.exists() and not any(path.is_relative_to(folder) for folder in ours):
            found[format_key(key)] = path
    return found


def bundle(loaded: LoadedRecipe, lacking: Mapping[str, Path], node: str) -> Bundle:
    """The files that ``node`` does not see. Raises ``UserError`` for one that cannot be shipped."""
    root = loaded.root.resolve()
    files: dict[str, bytes] = {}
    total = 0
    for key, path in lacking.items():
        where = f"{key}: node {node!r} does not see {path}, and it cannot be shipped there: it"
        if not path.resolve().is_relative_to(root):
            raise UserError(
                f"{where} is outside of the recipe's folder {root}; move it there, or to where all nodes see it"
            )
        parts = [path] if path.is_file() else [one for one in sorted(path.rglob("*")) if one.is_file()]
        total += sum(part.stat().st_size for part in parts)
        if total > MOST:
            raise UserError(
                f"{where} makes {size(total)} of files, and at most {size(MOST)} are shipped; put it where all nodes "
                "see it"
            )
        files |= {str(part.resolve().relative_to(root)): part.read_bytes() for part in parts}
    return Bundle(root, files)


def moved(loaded: LoadedRecipe, given: Bundle) -> LoadedRecipe:
    """The recipe with the bundle's files, in a folder of this node that ends with the process."""
    folder = Path(tempfile.mkdtemp(prefix="mmrl-recipe-"))
    for name, content in given.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    settings = _with_root(loaded.resolved(), str(given.root), str(folder))
    return replace(loaded, recipe=Recipe.model_validate(settings), root=folder)


def removed(loaded: LoadedRecipe) -> None:
    """Delete the folder that ``moved`` made."""
    shutil.rmtree(loaded.root, ignore_errors=True)


def _with_root(value: Json, before: str, after: str) -> Json:
    """``value`` with the paths of unpacked files where they are now; what this node sees stays where it is."""
    if isinstance(value, Mapping):
        return {key: _with_root(inner, before, after) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_root(inner, before, after) for inner in value]
    if not isinstance(value, str) or not value.startswith(f"{before}/"):
        return value
    there = f"{after}{value[len(before) :]}"
    return there if Path(split_file(there)[0] or there).exists() else value


def _ours() -> list[Path]:
    """Where mmrl itself lies: the same on every node that has the same version, perhaps under another path."""
    package = Path(mmrl.__file__).resolve().parent
    return [package, *(package.parent / name for name in ("pipelines", "rewards", "datasets", "environments"))]
