"""The process that asks math-verify whether two answers are equal. Run as a script, with the end of a pipe.

``python -P mathverify_child.py FD``: after ``{"ready": true}``, or ``{"error": "why"}``, one answer for each question
``{"found": ..., "wanted": ..., "seconds": ...}``: ``{"same": true}``, false or null where either cannot be parsed. JSON
in both directions. The kernel ends this process by SIGPROF where one question takes more than its ``seconds`` of
processor time: that needs no help of Python, nor of the parent, which may be gone.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

MEMORY = 4 << 30
"""Bytes of address space, so that an answer like 9^9^9^9 cannot take the machine's memory before its time is up."""
DIGITS = 1000
"""Significant digits up to which a difference of two numbers is computed, to show that it is none: never to show that
it is one."""


def main() -> None:
    """Answer until the pipe is closed."""
    pipe = Connection(int(sys.argv[1]))
    _limit_memory()
    try:
        same = _comparison()
    except Exception as error:
        pipe.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}).encode())
        return
    pipe.send_bytes(b'{"ready": true}')
    while True:
        try:
            question = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, question["seconds"])
        try:
            found = same(question["found"], question["wanted"])
        except (Exception, RecursionError):
            found = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(json.dumps({"same": found}).encode())


def _limit_memory() -> None:
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if most < 0 else min(MEMORY, most), most))


def _comparison() -> Callable[[str, str], bool | None]:
    """A function of two texts: whether they are equal, None where either is not understood."""
    import logging

    import sympy
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig  # pyright: ignore[reportMissingImports]
    from math_verify import (  # pyright: ignore[reportMissingImports]
        LatexExtractionConfig,
        grader,
        parse,
        verify,
    )

    logging.disable(logging.CRITICAL)
    sys.set_int_max_str_digits(0)
    grader.sympy_numeric_eq = lambda one, other, *_: _equal_numbers(one, other, sympy)
    # Its rules for units drop letters behind a number (3m is 3), and its rules for boxes join them: ours did both.
    rules = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
    )
    config = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=rules)]

    def read(text: str) -> Any:
        found = parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=None)  # type: ignore[arg-type]
        return _exact(found[0], sympy) if len(found) == 1 else None

    def same(found: str, wanted: str) -> bool | None:
        values = read(found), read(wanted)
        if None in values or any(hasattr(value, "has") and value.has(sympy.nan, sympy.zoo) for value in values):
            return None
        equal = verify(values[1], values[0], allow_set_relation_comp=True, timeout_seconds=None)
        equal = equal or _same_solutions(*values)
        return equal and not _without_solutions(values[1], values[0], sympy)

    same("(x+1)^2", "x^2+2x+1")  # what is read and built at first use takes seconds: not out of the first answer's time
    return same


def _exact(value: Any, sympy: ModuleType) -> Any:
    """Decimals as fractions, since 0.333333 is not 1/3; ``i`` is the imaginary unit."""
    if not hasattr(value, "xreplace"):
        return value
    floats = {number: sympy.Rational(str(number)) for number in value.atoms(sympy.Float)}
    units = {symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"}
    return value.xreplace({**floats, **units})


def _equal_numbers(one: Any, other: Any, sympy: ModuleType) -> bool:
    """Whether two numbers, or matrices of such, are equal, in place of math-verify's own comparison: that rounds."""
    one, other = (value.doit() if hasattr(value, "doit") else value for value in (one, other))
    if hasattr(one, "shape") or hasattr(other, "shape"):
        if getattr(one, "shape", None) != getattr(other, "shape", None):
            return False
        return all(_equal_numbers(a, b, sympy) for a, b in zip(one.flat(), other.flat(), strict=True))
    difference = one - other
    if difference.is_Number or difference.free_symbols:
        return difference == 0
    digits = difference.evalf(2, maxn=DIGITS).as_real_imag()
    if any(part.is_Float and part._prec > 1 and part != 0 for part in digits):
        return False
    return sympy.simplify(difference) == 0 or difference.equals(0) is True


def _same_solutions(one: Any, other: Any) -> bool:
    """Whether two inequalities of one and the same variable have the same solutions: 1 > x > 0 and 0 < x < 1."""
    kinds = {type(value).__name__ for value in (one, other)}
    if not kinds <= {"And", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan"}:
        return False
    if len(one.free_symbols) != 1 or one.free_symbols != other.free_symbols:
        return False
    return one.as_set() == other.as_set()


def _without_solutions(wanted: Any, found: Any, sympy: ModuleType) -> bool:
    """Whether two different equations were called equal because neither has a solution: x^2 = -1 and x^2 = -4."""
    if not (isinstance(wanted, sympy.Eq) and isinstance(found, sympy.Eq)):
        return False
    ratio = sympy.simplify((wanted.lhs - wanted.rhs) / (found.lhs - found.rhs))
    return not ratio.is_number and not sympy.solve(wanted, wanted.free_symbols)


if __name__ == "__main__":
    main()
