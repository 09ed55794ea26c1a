"""Run checks and print a line for each: ok, FAILED with the reason, or not run."""

from __future__ import annotations

import sys
import textwrap
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from mmrl.core.errors import UserError
from mmrl.core.plugins.user_code import describe, place_of

COLUMNS = 80
_PATIENCE_S = 2.0
"""A check that takes longer is named on stderr while it runs."""


class CannotRun(Exception):
    """A check lacks something: the message says what, and how to give it. It does not count as passed."""


@dataclass(frozen=True)
class Check:
    """``run`` returns a sentence on the result; the package documents the errors that it raises."""

    name: str
    run: Callable[[], str]


@dataclass(frozen=True)
class Result:
    """What came of a check, in a sentence."""

    name: str
    outcome: Literal["ok", "FAILED", "not run"]
    said: str

    def __str__(self) -> str:
        text = f"{self.outcome:<8}{self.name}: {self.said}"
        return "\n".join(
            textwrap.wrap(text, COLUMNS, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
        )


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
        raise AssertionError(f"{what} raised {describe(error)}; raise mmrl.core.errors.UserError: {change}") from error
    raise AssertionError(f"{what} was taken as if nothing were wrong; {change}")


def results(checks: Iterable[Check], file: str | None) -> Iterator[Result]:
    """Run ``checks`` one after the other. ``file``: the user's file, to name the lines of its errors."""
    for check in checks:
        with _named(check.name):
            result = _result(check, file)
        yield result


def _result(check: Check, file: str | None) -> Result:
    try:
        return Result(check.name, "ok", check.run())
    except CannotRun as lack:
        return Result(check.name, "not run", str(lack))
    except AssertionError as error:
        said = str(error) or f"an assertion failed at {place_of(error, file)}"
        return Result(check.name, "FAILED", said)
    except UserError as error:
        return Result(check.name, "FAILED", str(error))
    except Exception as error:
        said = f"raised {describe(error)} at {place_of(error, file)}; mend that line"
        return Result(check.name, "FAILED", said)


@contextmanager
def _named(name: str) -> Generator[None]:
    """Say on stderr which check is running where it takes long."""
    timer = threading.Timer(_PATIENCE_S, lambda: print(f"... {name}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def show(found: Iterable[Result], heading: str) -> int:
    """Print ``heading``, each result as it comes, and the counts. Returns 1 where one failed or none could run."""
    print(heading)
    counts = {"ok": 0, "FAILED": 0, "not run": 0}
    for result in found:
        counts[result.outcome] += 1
        print(result, flush=True)
    named = {"ok": "passed", "FAILED": "failed", "not run": "not run"}
    print(", ".join(f"{n} {named[outcome]}" for outcome, n in counts.items() if n))
    return int(bool(counts["FAILED"]) or not counts["ok"])
