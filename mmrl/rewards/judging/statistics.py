"""Agreement of two sets of verdicts. SciPy computes what it offers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import scipy  # its parts are loaded when they are first used

from mmrl.core.grouping import grouped

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


def wilson(k: int, n: int) -> tuple[float, float]:
    """The interval of 95 % of a proportion ``k / n`` (Wilson 1927)."""
    if n == 0:
        return 0.0, 1.0
    low, high = scipy.stats.binomtest(k, n).proportion_ci(method="wilson")
    return float(low), float(high)


def auc(scores: Sequence[float], truth: Sequence[bool]) -> float:
    """The probability that a right one scores above a wrong one, ties counting half; NaN where one kind is missing."""
    right = [score for score, is_so in zip(scores, truth, strict=True) if is_so]
    wrong = [score for score, is_so in zip(scores, truth, strict=True) if not is_so]
    if not right or not wrong:
        return math.nan
    return float(scipy.stats.mannwhitneyu(right, wrong, method="asymptotic").statistic) / (len(right) * len(wrong))


def auc_interval(area: float, positives: int, negatives: int) -> tuple[float, float]:
    """An interval of an AUC by Hanley and McNeil's standard error (Radiology 143, 1982), cut to [0, 1]."""
    if not positives or not negatives or math.isnan(area):
        return 0.0, 1.0
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (positives - 1) * (q1 - area**2) + (negatives - 1) * (q2 - area**2)
    half = Z95 * math.sqrt(max(variance, 0.0) / (positives * negatives))
    return max(0.0, area - half), min(1.0, area + half)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of ranks; NaN where one side is constant."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return math.nan
    return float(scipy.stats.spearmanr(a, b).statistic)


def concordance(scores: Sequence[float], truth: Sequence[float], groups: Sequence[object]) -> tuple[float, int]:
    """Pairs of one group whose truths differ: how many are ordered alike, and how many there are.

    Equal scores count half.
    """
    alike, pairs = 0.0, 0
    for index in rows_of(groups):
        for n, i in enumerate(index):
            for j in index[:n]:
                if truth[i] != truth[j]:
                    pairs += 1
                    difference = (scores[i] - scores[j]) * (truth[i] - truth[j])
                    alike += 1.0 if difference > 0 else 0.5 if difference == 0 else 0.0
    return alike, pairs


def rows_of(groups: Sequence[object]) -> list[list[int]]:
    """The rows of each group, of the name of each row's group."""
    return [*grouped((group, n) for n, group in enumerate(groups)).values()]
