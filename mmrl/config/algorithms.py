"""The algorithms by their names in a recipe: each is a file of ``mmrl/algorithms``.

A file holds an algorithm where a class takes its settings, of another class of that file:
``def __init__(self, settings: MySettings)``. A new file is found by that, and nothing else lists it. Only the algorithm
that a recipe names is imported.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

from mmrl._load import folders, load
from mmrl.algorithms.settings import AlgorithmSettings
from mmrl.config.aliases import alias_message
from mmrl.config.errors import did_you_mean
from mmrl.config.layers import kind_of
from mmrl.errors import UserError


class AlgorithmError(UserError, ValueError):
    """``algorithm.type`` names no algorithm; the message says what to write, after the key."""

    def __init__(self, message: str) -> None:
        super().__init__(f"algorithm.type: {message}")


@dataclass(frozen=True)
class Algorithm:
    """``objective`` is made of ``settings``; ``module`` is the file that holds both."""

    name: str
    objective: type
    settings: type[AlgorithmSettings]
    module: ModuleType


@cache
def algorithm_names() -> tuple[str, ...]:
    """The algorithms of this installation. Reads the files and imports none."""
    files = sorted(file for folder in folders("algorithms") for file in folder.glob("*.py"))
    return tuple(file.stem for file in files if _holds_one(file))


def shipped_algorithms() -> list[Algorithm]:
    """All of this installation, which are imported."""
    return [find_algorithm(name) for name in algorithm_names()]


@cache
def find_algorithm(name: str) -> Algorithm:
    """The algorithm that ``algorithm.type`` names, imported. Raises ``AlgorithmError``."""
    if not any((folder / f"{name}.py").is_file() and name.isidentifier() for folder in folders("algorithms")):
        raise AlgorithmError(unknown(name))
    module = load("algorithms", name)
    found = _algorithms_in(module, name)
    if not found:
        raise AlgorithmError(unknown(name))
    return found[0]


def unknown(name: object) -> str:
    """That ``name`` is no algorithm, what it may have meant, and which there are."""
    written, known = kind_of(name), algorithm_names()
    word = written.strip("'")
    return f"unknown type {written}{alias_message(word) or did_you_mean(word, known)}  (types: {', '.join(known)})"


def missing() -> str:
    """That there is no name, and which there are."""
    return f"missing; write one of {', '.join(algorithm_names())}"


def _holds_one(file: Path) -> bool:
    classes = {node.name: node for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.ClassDef)}
    makers = [
        node
        for cls in classes.values()
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__" and len(node.args.args) > 1
    ]
    taken = [maker.args.args[1].annotation for maker in makers]
    return any(isinstance(annotation, ast.Name) and annotation.id in classes for annotation in taken)


def _algorithms_in(module: ModuleType, name: str) -> list[Algorithm]:
    own = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    return [Algorithm(name, c, s, module) for c in own if (s := _settings_of(c)) and s.__module__ == module.__name__]


def _settings_of(cls: type) -> type[AlgorithmSettings] | None:
    """What the constructor takes, where that is the settings of an algorithm."""
    try:
        parameters = list(inspect.signature(cls.__init__).parameters)
        taken = get_type_hints(cls.__init__).get(parameters[1]) if len(parameters) > 1 else None
    except (NameError, TypeError, ValueError):  # of a class of another kind
        return None
    return taken if inspect.isclass(taken) and issubclass(taken, AlgorithmSettings) else None
