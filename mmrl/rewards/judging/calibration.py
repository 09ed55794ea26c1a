"""Whether a judge's scores mean what they say: of the cases it gives 0.8, about 80 % should be right.

Scores are put into bins of equal width, and each bin's mean score is compared with the share of its cases that are
right. The expected calibration error is the mean distance of the two, weighted by the bins' cases (Naeini et al., AAAI
2015; Guo et al., ICML 2017, equation 3). It is above 0 by chance alone, the more so the fewer cases there are, so the
error that a perfectly calibrated judge would have with the same scores stands beside it (Bröcker and Smith, 2007).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmrl.rewards.judging.statistics import Z95, wilson

BINS = 10
_DRAWS = 1000
_SEED = 0

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bin:
    """The cases whose score is from ``low`` to below ``high`` (to ``high`` in the last bin).

    ``score``: their mean; ``truth``: the share that is right, or the mean of true values, with an interval of 95 %.
    """

    low: float
    high: float
    cases: int
    score: float
    truth: float
    truth_low: float
    truth_high: float


@dataclass(frozen=True)
class Calibration:
    """``bins`` without the empty ones; ``error`` is the expected calibration error with the interval of 95 % of a
    bootstrap over cases; ``by_chance``: the error that 95 % of perfectly calibrated judges would stay below (NaN where
    the truth is not yes or no)."""

    bins: list[Bin]
    error: tuple[float, float, float]
    by_chance: float


def calibration(scores: Sequence[float], truth: Sequence[bool] | Sequence[float], bins: int = BINS) -> Calibration:
    """Calibration of ``scores`` against true values, both in [0, 1], of the same cases, one or more."""
    said, so = np.asarray(scores, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    place = np.minimum((said * bins).astype(np.int64), bins - 1)
    binary = bool(np.isin(so, (0.0, 1.0)).all())
    found = [_bin(said[place == k], so[place == k], k, bins, binary=binary) for k in range(bins) if (place == k).any()]
    draw = np.random.default_rng(_SEED)
    again = [draw.integers(0, len(said), len(said)) for _ in range(_DRAWS)]
    drawn = [_error(said[rows], so[rows], place[rows], bins) for rows in again]
    low, high = np.quantile(drawn, (0.025, 0.975))
    chance = math.nan
    if binary:
        ideal = [_error(said, (draw.random(len(said)) < said).astype(np.float64), place, bins) for _ in range(_DRAWS)]
        chance = float(np.quantile(ideal, 0.95))
    return Calibration(found, (_error(said, so, place, bins), float(low), float(high)), chance)


def _error(said: Floats, so: Floats, place: NDArray[np.int64], bins: int) -> float:
    """The sum over bins of |sum of scores - sum of true values|, divided by the cases."""
    apart = np.bincount(place, weights=said - so, minlength=bins)
    return float(np.abs(apart).sum() / len(said))


def _bin(said: Floats, so: Floats, k: int, bins: int, *, binary: bool) -> Bin:
    mean = float(so.mean())
    if binary:
        low, high = wilson(int(so.sum()), len(so))
    else:
        half = Z95 * float(so.std(ddof=1)) / math.sqrt(len(so)) if len(so) > 1 else math.nan
        low, high = mean - half, mean + half
    return Bin(k / bins, (k + 1) / bins, len(said), float(said.mean()), mean, low, high)
