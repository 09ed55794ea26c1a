"""Successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943): short trials first, the best of them longer.

With ``n`` trials and the factor ``f`` the rounds have ``n``, ``ceil(n / f)``, ... and at last one trial. The last round
is as long as the recipe; each round before it is ``f`` times shorter. Departs: the paper fixes a budget and divides it
by the rounds, so that the last trial is not trained to its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mmrl.core.errors import UserError


@dataclass(frozen=True)
class Round:
    """``trials``: how many take part; ``share``: how long each is trained, of the recipe's length."""

    trials: int
    share: Fraction

    def steps(self, whole: int) -> int:
        """The steps of a trial, of a recipe with ``whole`` steps."""
        return max(1, round(whole * self.share))


def rounds(trials: int, factor: int) -> list[Round]:
    """The rounds of a search. Raises ``UserError`` for a factor that leaves out nobody, and for fewer than 2 trials."""
    if factor < 2:
        raise UserError(f"--factor {factor}: each round keeps one of so many trials; set it to 2 or more")
    if trials < 2:
        raise UserError("there is only one trial, so there is nothing to compare; give --try KEY=A,B two values")
    counts = [trials]
    while counts[-1] > 1:
        counts.append(math.ceil(counts[-1] / factor))
    return [Round(count, Fraction(1, factor ** (len(counts) - 1 - n))) for n, count in enumerate(counts)]


def kept(values: Mapping[int, float | None], most: int) -> list[int]:
    """The ``most`` trials with the highest values, in the order of their numbers; the lower number wins a tie. A trial
    without a value (None: it failed) is never kept, so that fewer may be left."""
    able = [number for number, value in values.items() if value is not None and math.isfinite(value)]
    return sorted(sorted(able, key=lambda number: (-(values[number] or 0.0), number))[:most])


def work(plan: Sequence[Round], *, goes_on: bool) -> Fraction:
    """What the search costs, in trainings of the whole recipe. ``goes_on``: a round continues the trials of the one
    before it."""
    before = [Fraction(0), *(one.share for one in plan[:-1])]
    return sum(
        (one.trials * (one.share - (had if goes_on else 0)) for one, had in zip(plan, before, strict=True)), Fraction(0)
    )
