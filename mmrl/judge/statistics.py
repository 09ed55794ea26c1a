"""How well two readings of the same things agree. Pure functions of plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054
"""Standard normal quantile of a two-sided interval of 95 %."""


@dataclass(frozen=True)
class Confusions:
    """Counts of a judge (says yes: 1) against the truth (is so: 1)."""

    both: int
    judge_alone: int
    truth_alone: int
    neither: int

    @classmethod
    def of(cls, judged: Sequence[bool], truth: Sequence[bool]) -> Confusions:
        pairs = list(zip(judged, truth, strict=True))
        return cls(*(pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))))

    @property
    def n(self) -> int:
        return self.both + self.judge_alone + self.truth_alone + self.neither

    @property
    def accuracy(self) -> float:
        return (self.both + self.neither) / self.n if self.n else math.nan

    @property
    def kappa(self) -> float:
        """Cohen's kappa: agreement beyond what the two shares of yes give by chance; NaN where chance gives all."""
        if not self.n:
            return math.nan
        judge, truth = (self.both + self.judge_alone) / self.n, (self.both + self.truth_alone) / self.n
        chance = judge * truth + (1 - judge) * (1 - truth)
        return (self.accuracy - chance) / (1 - chance) if chance < 1 else math.nan


def wilson(k: int, n: int, z: float = Z95) -> tuple[float, float]:
    """The score interval of a proportion ``k / n`` (Wilson 1927)."""
    if n == 0:
        return 0.0, 1.0
    p, zz = k / n, z * z / n
    centre, half = p + zz / 2, z * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return max(0.0, (centre - half) / (1 + zz)), min(1.0, (centre + half) / (1 + zz))


def auc(scores: Sequence[float], truth: Sequence[bool]) -> float:
    """The probability that a right one scores above a wrong one, ties counting half; NaN where one kind is missing.

    The Mann-Whitney statistic divided by the number of pairs, from mid-ranks.
    """
    positives = sum(truth)
    negatives = len(truth) - positives
    if not positives or not negatives:
        return math.nan
    rank_sum = sum(rank for rank, right in zip(ranks(scores), truth, strict=True) if right)
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def auc_interval(area: float, positives: int, negatives: int, z: float = Z95) -> tuple[float, float]:
    """An interval of an AUC by Hanley and McNeil's standard error (Radiology 143, 1982), cut to [0, 1]."""
    if not positives or not negatives or math.isnan(area):
        return 0.0, 1.0
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (positives - 1) * (q1 - area**2) + (negatives - 1) * (q2 - area**2)
    half = z * math.sqrt(max(variance, 0.0) / (positives * negatives))
    return max(0.0, area - half), min(1.0, area + half)


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, equal values sharing the mean of theirs."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for place in range(first, last + 1):
            found[order[place]] = (first + last) / 2 + 1
        first = last + 1
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of ranks; NaN where one side is constant."""
    x, y = ranks(a), ranks(b)
    n = len(x)
    mean = (n + 1) / 2
    xy = math.fsum((i - mean) * (j - mean) for i, j in zip(x, y, strict=True))
    xx, yy = (math.fsum((i - mean) ** 2 for i in of) for of in (x, y))
    return xy / math.sqrt(xx * yy) if xx > 0 and yy > 0 else math.nan


def concordance(scores: Sequence[float], truth: Sequence[float], groups: Sequence[object]) -> tuple[float, int]:
    """Of the pairs of one group whose truths differ: how many are ordered alike, and how many there are.

    Equal scores count half.
    """
    alike, pairs = 0.0, 0
    by_group: dict[object, list[int]] = {}
    for i, group in enumerate(groups):
        by_group.setdefault(group, []).append(i)
    for index in by_group.values():
        for n, i in enumerate(index):
            for j in index[:n]:
                if truth[i] != truth[j]:
                    pairs += 1
                    difference = (scores[i] - scores[j]) * (truth[i] - truth[j])
                    alike += 1.0 if difference > 0 else 0.5 if difference == 0 else 0.0
    return alike, pairs
