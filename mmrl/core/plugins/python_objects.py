"""Python objects that stand in a recipe: a name for each, by which the recipe calls it.

An object that another process can load, a function or class at the top of a file, is called ``path/to/file.py:name``.
Any other (a closure, an instance, a function of a notebook) is called ``python:name``, and exists in this process only.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Collection
from pathlib import Path

from mmrl.core.plugins.loading import PYTHON, Kind, adopt, shelf


def name_of(kind: Kind, value: object, taken: Collection[str] = (), word: str = "") -> str:
    """The name by which a recipe calls ``value``: ``word``, or what it is called in Python, but for those ``taken``.

    An earlier object of that name is replaced, so that a cell of a notebook that is executed again names the same.
    """
    if in_file := _in_file(value):
        return in_file
    own = word or getattr(value, "__name__", None) or type(value).__name__
    base = own if own.isidentifier() else "function"
    names = (f"{PYTHON}:{base}{f'_{n}' if n > 1 else ''}" for n in itertools.count(1))
    name = next(name for name in names if name not in taken)
    setattr(shelf(kind), name.partition(":")[2], value)
    return name


def in_this_process(name: str) -> bool:
    """Whether ``name`` stands for an object that no other process has."""
    return name.partition(":")[0] == PYTHON


def _in_file(value: object) -> str:
    """``file.py:name`` of a function or class at the top of a file; empty for all else.

    The script that runs is not such a file: another process that imports it would run it again.
    """
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name, file = getattr(value, "__qualname__", ""), getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__" or not file or getattr(module, name, None) is not value:
        return ""
    path = Path(file).resolve()
    if path.suffix != ".py" or not (inspect.isfunction(value) or inspect.isclass(value)):
        return ""
    adopt(path, module)
    return f"{path}:{name}"
