"""Whether the fast tests notice what a restructuring could break: ``python -m tests.faults [NAME ...] [--jobs 2]``.

First all tests that are named must pass on the code as it is; then each fault is put in, alone, and at least one of its
tests must fail.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.faults.faults import FAULTS
from tests.faults.machinery import ROOT, Fault, GoneError, Result, mutated, results, warm

MAY_ESCAPE = 2
OUR_OWN_MISTAKES = ("SyntaxError", "NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError")
"""A test that fails with one of these has met a fault that is written wrongly."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.partition(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults whose names hold one of these; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (2)")
    asked = parser.parse_args()
    chosen = [f for f in FAULTS if not asked.names or any(name in f.name for name in asked.names)]
    os.chdir(ROOT)
    gone = dict(filter(None, map(_gone, chosen)))
    for name, why in gone.items():
        print(f"{name}: {why}; correct tests/faults/faults.py")
    if gone or not chosen:
        return 1
    warm()
    tests = sorted({test for fault in chosen for test in fault.tests})
    ((_, plain),) = results([(None, tests)], 1)
    broken = [why for test in tests if (why := _not_passed(test, plain))]
    if broken or plain.problem:
        print("Without a fault:", *broken, plain.problem, sep="\n")
        return 1
    print(f"{len(plain.passed)} tests pass without a fault, in {plain.seconds:.0f} s\n", flush=True)
    caught = wrong = 0
    for fault, result in results([(fault, fault.tests) for fault in chosen], asked.jobs):
        assert fault is not None
        what, right = _judged(result)
        caught, wrong = caught + (right and bool(result.failed)), wrong + (not right)
        print(f"{fault.name:<46} {fault.at}\n{'':<46} {what}, {result.seconds:.1f} s", flush=True)
    print(f"\n{caught} of {len(chosen)} caught by the fast tests")
    return int(wrong > 0 or caught < len(chosen) - MAY_ESCAPE)


def _gone(fault: Fault) -> tuple[str, str] | None:
    try:
        mutated(fault)
    except GoneError as error:
        return fault.name, str(error)
    return None


def _not_passed(test: str, plain: Result) -> str:
    """Why ``test``, of which there may be several with parameters, says nothing; empty where all is well."""

    def named(ids: object) -> list[str]:
        return [i for i in ids if i == test or i.startswith(f"{test}[")]  # type: ignore[attr-defined]

    failed = named(plain.failed)
    if failed:
        return f"{failed[0]} fails: {plain.failed[failed[0]]}"
    return "" if named(plain.passed) else f"{test} did not run: it is not there, it is slow, or it was skipped"


def _judged(result: Result) -> tuple[str, bool]:
    """What became of a fault, in words, and whether it was put in as it should be."""
    if result.problem:
        return f"NOT CAUGHT: {result.problem}", True
    if not result.loaded:
        return "WRONG: its tests never import the module", False
    if not result.failed:
        return "NOT CAUGHT", True
    test, raised = next(iter(result.failed.items()))
    if raised.partition(":")[0] in OUR_OWN_MISTAKES:
        return f"WRONG: the fault cannot be run ({raised})", False
    return f"caught by {test}", True


if __name__ == "__main__":
    sys.exit(main())
