"""The algorithms by their names in a recipe: a file of ``mmrl/algorithms``, or ``path/to/file.py:Class``.

A file holds an algorithm if one of its classes takes settings, whose class is in the same file:
``def __init__(self, settings: MySettings)``. A new file is found by that and needs no registration. Only the algorithm
that a recipe names is imported.
"""

from __future__ import annotations

import copyreg
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TypeVar, get_args, get_type_hints

from mmrl.config.algorithm_settings import AlgorithmSettings, Kind
from mmrl.config.aliases import alias_message
from mmrl.config.drop_ins import entries, missing_drop_in, split_file
from mmrl.config.errors import did_you_mean
from mmrl.config.layers import kind_of, shown
from mmrl.config.sampling import kind_of as kind_of_samples
from mmrl.core.errors import UserError
from mmrl.core.plugins.loading import absent, folders, load, load_from_file, shelf
from mmrl.core.plugins.python_objects import in_this_process
from mmrl.core.plugins.user_code import describe, place_of

T = TypeVar("T")


class AlgorithmError(UserError, ValueError):
    """``algorithm.type`` is not the name of an algorithm; the message says what to write, after the key."""

    def __init__(self, message: str) -> None:
        super().__init__(f"algorithm.type: {message}")


@dataclass(frozen=True)
class Algorithm:
    """``objective`` is constructed from ``settings``; ``module`` is the file that defines both."""

    name: str
    objective: type
    settings: type[AlgorithmSettings]
    module: ModuleType


@cache
def algorithm_names() -> tuple[str, ...]:
    """The names of this installation's algorithms. Reads the files without importing them."""
    return tuple(entry.name for entry in entries("algorithms"))


def shipped_algorithms() -> list[Algorithm]:
    """All algorithms of this installation, imported."""
    return [find_algorithm(name) for name in algorithm_names()]


def find_algorithm(name: str) -> Algorithm:
    """The algorithm that ``algorithm.type`` names, imported. Raises ``AlgorithmError``."""
    return _in_this_process(name) if in_this_process(name) else _found(name)


@cache
def _found(name: str) -> Algorithm:
    file, attribute = split_file(name)
    if file is not None:
        return _in_file(name, Path(file), attribute)
    if not any((folder / f"{name}.py").is_file() and name.isidentifier() for folder in folders("algorithms")):
        raise AlgorithmError(unknown(name))
    module = load("algorithms", name)
    found = _algorithms_in(module, name)
    if not found:
        raise AlgorithmError(unknown(name))
    return found[0]


def as_settings(section: object) -> object:
    """Import the algorithm that the section ``algorithm`` names, and return the section as its settings. A value that
    is not a mapping is returned unchanged. Raises ``AlgorithmError``; ``ValidationError`` if the settings are wrong."""
    if not isinstance(section, Mapping):
        return section
    if "type" not in section:
        raise AlgorithmError(f"missing; write one of {', '.join(algorithm_names())}")
    name = section["type"]
    if not isinstance(name, str):
        raise AlgorithmError(unknown(name))
    return find_algorithm(name).settings.model_validate(section)


_OF_PICTURES = {"sft": "picture_sft"}
"""Algorithms of texts that have another file for pictures, and its name."""


def for_samples(name: T, sampling: object) -> T | str:
    """The algorithm that ``name`` is in a recipe with the section ``sampling``: ``sft`` of pictures is
    ``picture_sft``."""
    of_pictures = sampling is not None and kind_of_samples(sampling) == "diffusion"
    return _OF_PICTURES.get(name, name) if of_pictures and isinstance(name, str) else name


def samples_nothing(section: object) -> bool:
    """Whether the section ``algorithm``, as written, names an algorithm without sampling."""
    if isinstance(section, AlgorithmSettings):
        return section.kind == "offline"
    name = section.get("type") if isinstance(section, Mapping) else None
    try:
        return isinstance(name, str) and find_algorithm(name).settings.kind == "offline"
    except AlgorithmError:  # the check of the section reports it
        return False


def _in_this_process(name: str) -> Algorithm:
    attribute = name.partition(":")[2]
    cls = getattr(shelf("algorithms"), attribute, None)
    if cls is None:
        raise AlgorithmError(absent("algorithms", attribute))
    settings = _checked(cls, attribute)
    return Algorithm(name, cls, settings, sys.modules[cls.__module__])


def _in_file(name: str, file: Path, attribute: str) -> Algorithm:
    if wrong := missing_drop_in("algorithms", name, "looked in the current folder"):
        raise AlgorithmError(wrong)
    try:
        module = load_from_file(str(file))
    except Exception as error:
        place = place_of(error, str(file))
        raise AlgorithmError(f"importing {shown(file)} raised {one_line(error)} at {place}; mend that line") from error
    classes = [getattr(module, attribute)] if attribute else [found.objective for found in _algorithms_in(module, name)]
    if not classes:
        raise AlgorithmError(f"{shown(file)} has no algorithm. {_FORM}")
    cls = classes[0]
    if len(classes) > 1:
        several = ", ".join(cls.__name__ for cls in classes)
        raise AlgorithmError(f"{shown(file)} has several ({several}); name one, as in {file.name}:{cls.__name__}")
    settings = _checked(cls, f"{shown(file)}:{attribute or cls.__name__}")
    copyreg.pickle(settings, _sent)  # other processes load the file by path: its module cannot be imported
    return Algorithm(name, cls, settings, module)


_FORM = (
    "An algorithm is a class with def __init__(self, settings: MySettings), where MySettings is a subclass of "
    "mmrl.config.algorithm_settings.AlgorithmSettings"
)


def _checked(cls: type, where: str) -> type[AlgorithmSettings]:
    """The settings class of a user's algorithm. Raises ``AlgorithmError`` if ``cls`` cannot be an algorithm."""
    settings = _settings_of(cls) if inspect.isclass(cls) else None
    if settings is None:
        raise AlgorithmError(f"{where} takes no settings. {_FORM}")
    kind = getattr(cls, "kind", None)
    if kind not in get_args(Kind):
        raise AlgorithmError(
            f"{where} has no kind, and must say which protocol of mmrl.algorithms.objective it follows; write "
            f"kind = {' or '.join(repr(one) for one in get_args(Kind))} in the class"
        )
    if kind != settings.kind:
        raise AlgorithmError(
            f"{where} is of kind {kind}, and its settings {settings.__name__} of kind {settings.kind}; write the same "
            f"kind in both, or build {settings.__name__} on the settings of that kind in mmrl.config.algorithm_settings"
        )
    if lacking := ", ".join(sorted(getattr(cls, "__abstractmethods__", ()))):
        raise AlgorithmError(f"{where} lacks {lacking}, which {cls.__mro__[1].__name__} leaves to it; write it")
    return settings


def _sent(settings: AlgorithmSettings) -> tuple[Callable[[str, str], AlgorithmSettings], tuple[str, str]]:
    return _received, (settings.type, settings.model_dump_json())


def _received(name: str, values: str) -> AlgorithmSettings:
    return find_algorithm(name).settings.model_validate_json(values)


def one_line(error: BaseException) -> str:
    """The error's type and message, on one line."""
    return " ".join(describe(error).split())


def unknown(name: object) -> str:
    """A message: ``name`` is no algorithm, what was perhaps meant, and which algorithms exist."""
    written, known = kind_of(name), algorithm_names()
    word = written.strip("'")
    return f"unknown type {written}{alias_message(word) or did_you_mean(word, known)}  (types: {', '.join(known)})"


def _algorithms_in(module: ModuleType, name: str) -> list[Algorithm]:
    own = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    return [Algorithm(name, c, s, module) for c in own if (s := _settings_of(c)) and s.__module__ == module.__name__]


def _settings_of(cls: type) -> type[AlgorithmSettings] | None:
    """The class of the constructor's settings, if it takes the settings of an algorithm."""
    try:
        parameters = list(inspect.signature(cls.__init__).parameters)
        taken = get_type_hints(cls.__init__).get(parameters[1]) if len(parameters) > 1 else None
    except (NameError, TypeError, ValueError):  # not an algorithm's class
        return None
    return taken if inspect.isclass(taken) and issubclass(taken, AlgorithmSettings) else None
