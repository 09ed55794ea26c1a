"""Find the kind of a plug-in from its file or name."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

from mmrl.config.algorithms import algorithm_names
from mmrl.config.drop_ins import split_file
from mmrl.config.loader import shipped_recipes
from mmrl.core.errors import UserError
from mmrl.core.plugins.loading import Kind as DropIn
from mmrl.core.plugins.loading import load_from_file, names
from mmrl.core.plugins.user_code import blaming
from mmrl.rewards.peers import peer_of

Kind = Literal["algorithm", "reward", "judge", "dataset", "engine", "pipeline", "environment"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_OF_FOLDER: Mapping[DropIn, Kind] = {
    "rewards": "reward",
    "datasets": "dataset",
    "pipelines": "pipeline",
    "environments": "environment",
}


def kind_of(name: str) -> Kind:
    """The kind of a plug-in of ours or of a user's, or of a recipe (a pipeline's). Raises ``UserError`` where that
    cannot be told."""
    file, attribute = split_file(name)
    if file is None:
        found = _of_ours(name)
    elif not Path(file).is_file():
        raise UserError(f"there is no file {file} (looked from {Path.cwd()})")
    else:
        found = _of_file(name, file, attribute)
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{name} is the name of {' and of '.join(map(_article, found))}; say which with --kind")
    if file is not None:
        raise UserError(
            f"{name} {_unlike(name, attribute)}; mend it, or say with --kind what it is ({', '.join(KINDS)})"
        )
    raise UserError(
        f"there is no telling what {name} is; write one of ours (mmrl ls; docs/algorithms.md), a recipe, or "
        "path/to/file.py:NAME, and say "
        f"with --kind which it is ({', '.join(KINDS)})"
    )


def _unlike(name: str, attribute: str) -> str:
    """Why an object or a file of a user's is none of the kinds."""
    if not attribute:
        return "defines no plug-in; name one in it, as in file.py:score"
    found = load_from_file(name)
    takes = f"takes {inspect.signature(found)}" if inspect.isfunction(found) else "is no plug-in"
    return f"{takes}; a reward takes (samples, *, context), a data set (split), a pipeline (recipe)"


def _of_ours(name: str) -> list[Kind]:
    target = name.partition(":")[0]
    found: list[Kind] = [kind for folder, kind in _OF_FOLDER.items() if target in names(folder)]
    if target == "judge":
        found = ["judge"]
    if name in algorithm_names():
        found.append("algorithm")
    if not found and (name in shipped_recipes() or name.endswith((".yaml", ".yml"))):
        found.append("pipeline")
    return found


def _of_file(name: str, file: str, attribute: str) -> list[Kind]:
    with blaming(f"importing {file}", file):
        found = load_from_file(name)
    if not isinstance(found, ModuleType):
        return _of_object(found)
    defaults = ("build", "prompts", "score", "Environment")
    kinds: list[Kind] = [kind for n in defaults for kind in _of_object(getattr(found, n, None))]
    if not kinds and not attribute:
        own = [n.name for n in ast.parse(Path(file).read_bytes()).body if isinstance(n, ast.ClassDef)]
        kinds = [kind for n in own for kind in _of_object(getattr(found, n)) if kind == "algorithm"]
    return list(dict.fromkeys(kinds))


def _of_object(found: object) -> list[Kind]:
    if inspect.isclass(found):
        if any(base.__name__ == "Judge" and base.__module__ == "mmrl.rewards.judge" for base in found.__mro__):
            return ["judge"]
        if callable(getattr(found, "loss", None)):
            return ["algorithm"]
        if any(callable(getattr(found, method, None)) for method in ("generate", "update", "update_lora")):
            return ["engine"]
        if callable(getattr(found, "score", None)):
            return ["reward"]
        return ["environment"] if callable(getattr(found, "reset", None)) else []
    if not callable(found):
        return []
    parameters = list(inspect.signature(found).parameters)
    if "context" in parameters or peer_of(found):
        return ["reward"]
    if parameters[:1] == ["split"]:
        return ["dataset"]
    if parameters[:1] == ["recipe"]:
        return ["pipeline"]
    return ["environment"] if inspect.isfunction(found) and found.__annotations__.get("return") else []


def _article(kind: Kind) -> str:
    return {
        "algorithm": "an algorithm",
        "engine": "an engine",
        "dataset": "a data set",
        "environment": "an environment",
    }.get(kind, f"a {kind}")
