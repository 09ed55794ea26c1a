"""Print the time of a test run by file, and by test with all its cases, from pytest's JUnit file.

pytest -n 2 -m "not slow" --junitxml times.xml
python tools/suite_times.py times.xml [--before other.xml] [--tests 20]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

Times = defaultdict[str, float]


def seconds(path: Path) -> dict[tuple[str, str], float]:
    """Seconds of each test, all its cases together, by file and name. Raises ``SystemExit`` for no such file."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        raise SystemExit(f"{path} is no JUnit file ({error}); write one with: pytest --junitxml {path}") from error
    for case in cases:
        module = (case.get("classname") or case.get("name") or "").removeprefix("tests.")
        found[module.replace(".", "/"), (case.get("name") or "").partition("[")[0]] += float(case.get("time") or 0)
    return dict(found)


def summed(times: dict[tuple[str, str], float], key: Callable[[tuple[str, str]], str]) -> Times:
    total: Times = defaultdict(float)
    for test, spent in times.items():
        total[key(test)] += spent
    return total


def table(now: Times, before: Times | None, rows: int) -> str:
    """The ``rows`` largest, by the earlier run where there is one, and the sum of all."""
    first = now if before is None else before
    names = sorted({*first, *now}, key=lambda name: -max(first[name], now[name]))[:rows]
    lines = [(name, first[name], now[name]) for name in names] + [("all", sum(first.values()), sum(now.values()))]
    return "\n".join(
        f"{was:8.1f} {now_:8.1f}  {name}" if before else f"{now_:8.1f}  {name}" for name, was, now_ in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--before", type=Path, help="an earlier run, in a column before it")
    parser.add_argument("--tests", type=int, default=20, help="how many files and tests to show")
    words = parser.parse_args()
    now, before = seconds(words.file), seconds(words.before) if words.before else None
    keys: dict[str, Callable[[tuple[str, str]], str]] = {"file": lambda test: test[0], "test": "::".join}
    for title, key in keys.items():
        print(f"seconds by {title}")
        print(table(summed(now, key), None if before is None else summed(before, key), words.tests), end="\n\n")


if __name__ == "__main__":
    main()
