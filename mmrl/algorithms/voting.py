"""Votes over several critiques of one response: which of its steps are wrong (CAPO, arXiv 2508.02298). No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

Vote = Literal["intersection", "majority", "union", "average"]


def vote(critiques: Sequence[Iterable[int]], rule: Vote) -> dict[int, float]:
    """The penalty of each wrong step, in (0, 1], by the step's number, in order.

    ``critiques``: one list of wrong steps per critique; a step named twice in a list counts once. ``intersection``: all
    critiques name it; ``majority``: at least half do (two of four are enough); ``union``: any does; ``average``: any
    does, and the penalty is the share that do. Without critiques no step is wrong.
    """
    counts = Counter(step for critique in critiques for step in set(critique))
    n = len(critiques)
    if rule == "average":
        return {step: counts[step] / n for step in sorted(counts)}
    least = {"intersection": n, "majority": n / 2, "union": 1}[rule]
    return {step: 1.0 for step in sorted(counts) if counts[step] >= least}
