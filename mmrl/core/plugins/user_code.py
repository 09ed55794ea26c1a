"""Code in files of a user's: what its errors say, where it raised, and whether options fit its signature.

Imports no torch: ``mmrl serve`` and ``mmrl score`` run rewards in environments that have none.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sysconfig
import threading
import traceback
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mmrl.core.errors import UserError, did_you_mean, plain

_PARSING = threading.Lock()
"""``inspect`` parses a file to find a class in it, and Python 3.11's parser fails when two threads do that at once
(SystemError: AST constructor recursion depth mismatch; python/cpython#106905)."""

_STANDARD = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_INSTALLED = {"site-packages", "dist-packages"}


def describe(error: BaseException) -> str:
    """``ValueError: what it says``, fit to be printed."""
    text = plain(said_by(error)).strip()
    return f"{_name_of(error)}: {text}" if text else _name_of(error)


def said_by(error: BaseException) -> str:
    """``str(error)``, where the class of an error may be anybody's: its ``__str__`` may raise, or return no text."""
    try:
        return str(error)
    except BaseException as other:
        return f"(its __str__ raised {_name_of(other)})"


def _name_of(error: BaseException) -> str:
    return str(type.__dict__["__name__"].__get__(type(error)))  # not what its metaclass may say


def place_of(error: BaseException, file: str | None) -> str:
    """``file:line`` where ``error`` was raised: the innermost line of ``file`` on the way, else of code that is neither
    mmrl's nor an installed library's, else of any file."""
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and error.filename:
        return f"{short_path(error.filename)}:{error.lineno}"
    frames = list(traceback.walk_tb(error.__traceback__))
    wanted = None if file is None else os.path.realpath(file)
    of_file = [pair for pair in frames if os.path.realpath(pair[0].f_code.co_filename) == wanted]
    own = of_file or [pair for pair in frames if not _of_library(pair[0])] or frames
    return f"{short_path(own[-1][0].f_code.co_filename)}:{own[-1][1]}" if own else "an unknown line"


@contextmanager
def blaming(what: str, file: str | None, edit: str = "that line") -> Generator[None]:
    """What a user's code raises inside is a ``UserError``, which says that ``what`` raised it, where (``place_of``) and
    what to mend: ``edit``. A ``UserError`` passes as it is."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} raised {describe(error)} at {place_of(error, file)}; mend {edit}") from error


def raised(error: BaseException, file: str | None, meta: Mapping[str, object]) -> tuple[str, str]:
    """What a reward's function raised and where, and the edit that mends it; ``meta`` is that of a prompt it got."""
    place = place_of(error, file)
    return f"raised {describe(error)} at {place}", f"mend {place}{column_hint(error, meta)}{_attribute_hint(error)}"


def column_hint(error: BaseException, meta: Mapping[str, object]) -> str:
    """What to do where a reward asked a prompt's ``meta`` for a column that the data does not hand on; else empty."""
    try:
        key = error.args[0] if isinstance(error, KeyError) and error.args else None
    except BaseException:
        return ""
    if not isinstance(key, str) or key in meta:
        return ""
    has = f"has {', '.join(sorted(meta))}" if meta else "is empty"
    return f" (sample.prompt.meta {has}; for a column {key!r} of your data set meta: [{key}] in data.train and heldout)"


def _attribute_hint(error: BaseException) -> str:
    """What a sample, prompt or other record of mmrl has, where a reward asked it for something else; else empty."""
    try:
        of = error.obj if isinstance(error, AttributeError) else None
    except BaseException:  # a property of its own class
        return ""
    if not dataclasses.is_dataclass(of) or not type(of).__module__.startswith("mmrl."):
        return ""
    return f" (a {type(of).__name__} has {', '.join(field.name for field in dataclasses.fields(of))})"


def _of_library(frame: FrameType) -> bool:
    name, file = frame.f_globals.get("__name__") or "", frame.f_code.co_filename
    installed = file.startswith(("<frozen ", *_STANDARD)) or not _INSTALLED.isdisjoint(Path(file).parts)
    return installed or name == "mmrl" or name.startswith("mmrl.")


def defined_at(target: Callable[..., object], file: str | None, name: str) -> str:
    """``file:line`` of the definition of ``target``, or ``name`` where that cannot be told."""
    try:
        with _PARSING:
            line = inspect.getsourcelines(target)[1]
        return f"{short_path(file or '')}:{line}"
    except (OSError, TypeError):
        return name


def source_of(target: Callable[..., object]) -> str:
    """The text of a class or function; empty where that cannot be told."""
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
            has = f"(it has: {', '.join(known) or 'none'})"
            wrong.append(f"options.{key}: {name} has no such option{did_you_mean(key, known)} {has}")
    for p in parameters:
        if p.name in known and p.default is p.empty and p.name not in options:
            wrong.append(f"options.{p.name}: {name} needs it; add options: {{{p.name}: ...}}")
    return wrong
