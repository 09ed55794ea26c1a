"""Load a drop-in by the name in a recipe: a built-in one, or a function in any file of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only

Kind = Literal["pipelines", "rewards", "datasets", "algorithms", "environments"]
_LOCK = threading.RLock()
PYTHON = "python"
"""In place of a module's name: an object of this process (``mmrl.core.plugins.python_objects``), as in
``python:my_reward``."""
_SHELVES: dict[str, ModuleType] = {}


class LoadError(UserError, ValueError):
    """A drop-in cannot be found or imported; the message says which and what to write instead."""


def load(kind: Kind, name: str) -> Any:
    """Return the module or attribute that ``name`` stands for.

    ``shapes`` is the module ``mmrl.<kind>.shapes``, ``shapes:verify`` an attribute of it, ``diffusion/sd3`` a module in
    a folder, and ``path/to/mine.py:name`` an attribute of a file. Raises ``LoadError``.
    """
    allow_cpu_only()  # transformers and diffusers, which drop-ins import, import torchvision wherever it is installed
    target, _, attribute = name.partition(":")
    with _LOCK:  # a thread must not see a module that another is still executing
        module = _from_file(Path(target)) if target.endswith(".py") else _from_package(kind, target)
    if target == PYTHON and not hasattr(module, attribute):
        raise LoadError(absent(kind, attribute))
    return _attribute(module, target, attribute)


def load_from_file(name: str) -> Any:
    """Return the module of the file ``path/to/mine.py``, or what ``path/to/mine.py:name`` names in it.

    Raises ``LoadError``, and whatever the file raises when it is imported.
    """
    allow_cpu_only()
    target, _, attribute = name.partition(":")
    with _LOCK:
        module = _from_file(Path(target))
    return _attribute(module, target, attribute)


def shelf(kind: Kind) -> ModuleType:
    """The objects of this process that recipes call ``python:name``, as attributes."""
    return _SHELVES.setdefault(kind, ModuleType(f"{PYTHON}:{kind}"))


def adopt(path: Path, module: ModuleType) -> None:
    """Have the file ``path`` stand for ``module``, which was imported from it, so that it is not executed again."""
    with _LOCK:
        sys.modules[_name_of_file(path)] = module


def absent(kind: Kind, attribute: str) -> str:
    """The message that this process has no object ``python:attribute``."""
    argument = {"datasets": "data", "algorithms": "algorithm", "environments": "environment"}.get(kind, kind)
    return (
        f"{PYTHON}:{attribute} is a Python object of the process that began the run, which this process lacks; "
        f"call mmrl.train with {argument}=... and resume=True, or put it into a file and write path/to/file.py:name"
    )


def _attribute(module: ModuleType, target: str, attribute: str) -> Any:
    if not attribute:
        return module
    if not hasattr(module, attribute):
        public = [n for n, v in vars(module).items() if not n.startswith("_") and callable(v)]
        raise LoadError(f"{target} has no {attribute!r}; it has: {', '.join(public) or 'no functions or classes'}")
    return getattr(module, attribute)


def folders(kind: Kind) -> list[Path]:
    """Where drop-ins of ``kind`` lie. Imports the package that they join, and none of them."""
    return [Path(folder) for folder in importlib.import_module(f"mmrl.{kind}").__path__]


def names(kind: Kind) -> list[str]:
    """The drop-ins of ``kind`` that this installation holds, by the name a recipe calls them."""
    found = {
        path.relative_to(root).with_suffix("").as_posix()
        for root in folders(kind)
        for path in root.rglob("*.py")
        if not path.name.startswith("_") and (path.parent != root or (root / "__init__.py") != path)
    }
    return sorted(found)


def _from_package(kind: Kind, target: str) -> ModuleType:
    if target == PYTHON:
        return shelf(kind)
    module = f"mmrl.{kind}.{target.replace('/', '.')}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            raise LoadError(
                f"there is no {kind[:-1]} {target!r}; this installation has {', '.join(names(kind))}, "
                "and a file of your own is written path/to/file.py:name"
            ) from None
        raise LoadError(
            f"{module} imports {error.name!r}, which is not installed; install the package that has it"
        ) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise LoadError(f"there is no file {path} (looked from {Path.cwd()})")
    name = _name_of_file(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _name_of_file(path: Path) -> str:
    """What the module of a user's file is called in ``sys.modules``."""
    return f"mmrl_user_{path.stem}_{abs(hash(path.resolve())):x}"
