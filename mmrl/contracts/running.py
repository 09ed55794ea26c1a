"""What the checks of a contract are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmrl.errors import UserError
from mmrl.user_code import describe


class CannotRun(Exception):
    """A check lacks something: the message says what, and how to give it. It does not count as passed."""


@dataclass(frozen=True)
class Check:
    """``run`` returns a sentence with what it found; see the package for what it raises."""

    name: str
    run: Callable[[], str]


def expect(holds: object, why: str) -> None:
    """Raise ``AssertionError`` with ``why`` unless ``holds``."""
    if not holds:
        raise AssertionError(why)


def refused(call: Callable[[], object], what: str, change: str) -> str:
    """The message of the ``UserError`` that ``call`` raises. Raises ``AssertionError`` where it raises another, or
    none: ``what`` was not refused, ``change`` says how to."""
    try:
        call()
    except UserError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{what} raised {describe(error)}; raise mmrl.errors.UserError: {change}") from error
    raise AssertionError(f"{what} was taken as if nothing were wrong; {change}")
