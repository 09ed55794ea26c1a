"""Sweeps: tests that try many inputs of a kind, few of them by default and many with ``--long-sweeps``.

    pytest -m sweep                  # the short form, which CI runs among the other tests
    pytest -m sweep --long-sweeps    # the long form

At the end of both a table says how many inputs of each kind were tried, and how many failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

SHOWN = 5
"""How many inputs that failed an error message shows."""


@dataclass
class Sweep:
    """Counts the inputs of one kind that a test tried, and those that failed.

    A test asks ``size`` how many inputs to make, calls ``check`` for each, and ends with ``done``, which fails if an
    input failed.
    """

    kind: str
    long: bool
    tried: int = 0
    failed: list[str] = field(default_factory=list)

    def size(self, short: int, long: int) -> int:
        """How many inputs to try in this form."""
        return long if self.long else short

    def check(self, ok: bool, case: object) -> None:
        """Count an input; ``case`` is shown where ``ok`` is false."""
        self.tried += 1
        if not ok:
            self.failed.append(str(case)[:1000])

    def run(self, cases: Iterable[object], right: Callable[[object], bool]) -> None:
        """Check every case with ``right``; an exception is a failure too, and is shown with its case."""
        for case in cases:
            try:
                self.check(right(case), case)
            except Exception as error:
                self.check(False, f"{case!r}: {type(error).__name__}: {error}")

    def done(self) -> None:
        """Fail if an input failed, or if none was tried."""
        assert self.tried, f"{self.kind}: no input was tried"
        shown = "\n".join(self.failed[:SHOWN])
        assert not self.failed, f"{self.kind}: {len(self.failed)} of {self.tried} inputs failed, the first:\n{shown}"


def table(rows: Iterable[tuple[str, int, int]]) -> list[str]:
    """Lines of kind, inputs tried and inputs failed; tests of one kind are added up."""
    sums: dict[str, list[int]] = {}
    for kind, tried, failed in rows:
        tally = sums.setdefault(kind, [0, 0])
        tally[0] += tried
        tally[1] += failed
    return [f"{kind:<60} {tried:>8,} tried {failed:>6,} failed" for kind, (tried, failed) in sorted(sums.items())]
