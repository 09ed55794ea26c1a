"""Code in files of a user's: what its errors say, where it raised, and whether options fit its signature.

Imports no torch: ``mmrl serve`` and ``mmrl score`` run rewards in environments that have none.
"""

from __future__ import annotations

import difflib
import inspect
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from mmrl.errors import plain

_PARSING = threading.Lock()
"""``inspect`` parses a file to find a class in it, and Python 3.11's parser fails when two threads do that at once
(SystemError: AST constructor recursion depth mismatch; python/cpython#106905)."""


def describe(error: BaseException) -> str:
    """``ValueError: what it says``, fit to be printed."""
    text = plain(str(error)).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def place_of(error: BaseException, file: str | None) -> str:
    """``file:line`` where ``error`` was raised: the innermost line of ``file`` on the way, else of any file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_path(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or list(frames)
    return f"{short_path(own[-1].filename)}:{own[-1].lineno}" if own else "an unknown line"


def defined_at(target: Callable[..., object], file: str | None, name: str) -> str:
    """``file:line`` of the definition of ``target``, or ``name`` where that cannot be told."""
    try:
        with _PARSING:
            line = inspect.getsourcelines(target)[1]
        return f"{short_path(file or '')}:{line}"
    except (OSError, TypeError):
        return name


def source_of(target: type) -> str:
    """The text of a class; empty where that cannot be told."""
    try:
        with _PARSING:
            return inspect.getsource(target)
    except (OSError, TypeError):
        return ""


def short_path(path: str) -> str:
    """``path`` from the current folder where it lies below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def option_problems(
    name: str, function: Callable[..., object], options: Mapping[str, object], reserved: Collection[str]
) -> list[str]:
    """What is wrong with ``options`` as keyword arguments of ``function``, which gets ``reserved`` from mmrl."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in reserved]
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    wide = any(p.kind is p.VAR_KEYWORD for p in parameters)
    wrong = []
    for key in options:
        if key in reserved or (key not in known and not wide):
            close = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            wrong.append(f"options.{key}: {name} has no such option{hint} (it has: {', '.join(known) or 'none'})")
    for p in parameters:
        if p.name in known and p.default is p.empty and p.name not in options:
            wrong.append(f"options.{p.name}: {name} needs it; add options: {{{p.name}: ...}}")
    return wrong
