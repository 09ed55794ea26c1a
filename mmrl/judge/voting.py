"""Combine several critiques into one verdict. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

NumberVote = Literal["mean", "median", "majority"]
StepVote = Literal["intersection", "majority", "union", "average"]


def vote_number(verdicts: Sequence[float], how: NumberVote) -> float:
    """One number from several in [0, 1]. ``majority``: 1 where more than half are above 0.5, else 0 (a tie is 0)."""
    if how == "mean":
        return statistics.fmean(verdicts)
    if how == "median":
        return float(statistics.median(verdicts))
    return float(sum(v > 0.5 for v in verdicts) * 2 > len(verdicts))


def vote_steps(verdicts: Sequence[Sequence[int]], how: StepVote) -> dict[int, float]:
    """Which steps are wrong, and how much so (0 to 1), from the wrong steps that each critique named.

    CAPO (arXiv 2508.02298): ``intersection`` takes a step that all critiques named, ``majority`` one that at least
    half of them did (count >= k / 2), ``union`` one that any did; ``average`` gives each its share of the critiques.
    """
    k = len(verdicts)
    counts: dict[int, int] = {}
    for verdict in verdicts:
        for step in set(verdict):
            counts[step] = counts.get(step, 0) + 1
    if how == "average":
        return {step: count / k for step, count in sorted(counts.items())}
    least = {"intersection": k, "majority": k / 2, "union": 1}[how]
    return {step: 1.0 for step, count in sorted(counts.items()) if count >= least}


def ranking_scores(ranking: Sequence[int]) -> list[float]:
    """Scores of ``K`` candidates from a ranking of their numbers 1 to ``K``, best first: (K - place) / (K - 1).

    One candidate alone has 0.5. The mean over several rankings is Borda's count.
    """
    k = len(ranking)
    places = {candidate: place for place, candidate in enumerate(ranking)}
    return [0.5 if k == 1 else (k - 1 - places[c]) / (k - 1) for c in range(1, k + 1)]
