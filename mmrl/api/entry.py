"""What every function of the Python interface does around its work: it leaves the process as it was, and its errors
name the arguments of Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from mmrl.core.errors import UserError
from mmrl.core.quiet import as_before, quietly

P = ParamSpec("P")
R = TypeVar("R")

_COMMAND = re.compile(r"(?:\bmmrl|\bray|\bsrun|\btorchrun|\bpip) [a-z][^;()\n]*")
"""A command for the shell, to the end of its clause: its options stay as they are."""
_CHOICES = ("resume", "overwrite", "extend", "hold", "public", "push-to-hub")
_OPTION = re.compile(
    r"(?<![\w-])--(?P<name>[a-z][a-z-]*)(?: (?P<value>other|latest|best|base|[0-9]+|RUN|[A-Z]+=\S+)\b)?"
)


def entry_point(function: Callable[P, R]) -> Callable[P, R]:
    """A function of the Python interface."""
    return as_before()(step_of_run(function))


def step_of_run(function: Callable[P, R]) -> Callable[P, R]:
    """A function that opens a run, or is called while one is open: a run that is open listens to signals."""
    return quietly()(errors_of_python()(function))


@contextmanager
def errors_of_python() -> Generator[None]:
    """A ``UserError`` names arguments of Python (``resume=True``) in place of options of the shell (``--resume``)."""
    try:
        yield
    except UserError as error:
        error.args = tuple(in_python_words(one) if isinstance(one, str) else one for one in error.args)
        raise


def in_python_words(text: str) -> str:
    """``text`` with options of the command line as arguments; commands in it stay as they are."""
    parts, end = [], 0
    for command in _COMMAND.finditer(text):
        parts += [_OPTION.sub(_argument, text[end : command.start()]), command[0]]
        end = command.end()
    return "".join([*parts, _OPTION.sub(_argument, text[end:])])


def _argument(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if name in _CHOICES:
        return f"{name}=True" + (f" {value}" if value else "")
    word = {"try": "tried", "options": "options"}.get(name, name.replace("-", "_"))
    if value is None:
        return word
    return f"{word}={value}" if value.isdigit() else f"{word}={value!r}"
