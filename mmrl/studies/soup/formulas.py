"""The formulas of Bone Soup (arXiv 2502.10762): combined rewards, merging weights, and the measures of a front.

Notation: ``n`` rewards ``r_i``; ``B`` [n, n] combines them into the rewards ``h = B r`` of the ``n`` backbones;
``mu`` [n] is how much each reward shall count in the merged model; ``lambda`` [n] is how much each backbone does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.core.errors import UserError

Point = tuple[float, float]
"""Two rewards of one model, larger is better."""


def combination(n: int, beta: float) -> Tensor:
    """``B`` [n, n] in float64: ``beta`` on the diagonal and ``(1 - beta) / (n - 1)`` elsewhere, so that rows sum to 1.

    The paper's symmetric circulant matrix, for ``1/n < beta < 1``. With ``beta`` 1, which
    is allowed here, each backbone has a reward of its own: Rewarded Soup (arXiv 2306.04488).
    Raises ``UserError`` for other values, for which ``B`` is singular or each backbone prefers the others' rewards.
    """
    if not (1 / n < beta <= 1):
        raise UserError(
            f"--beta {beta:g}: with {n} rewards it is above {1 / n:.3g} and at most 1; 0.6, 0.7 and 0.8 are the "
            "paper's choices"
        )
    others = (1 - beta) / (n - 1)
    return torch.full((n, n), others, dtype=torch.float64) + (beta - others) * torch.eye(n, dtype=torch.float64)


def merging_weights(
    b: Tensor, mu: Sequence[float], *, extrapolate: bool = True, beyond: Sequence[float] = ()
) -> list[float]:
    """``lambda = B^-1 (k mu)`` [n], the weights of the backbones, with ``k_i = 1 / (1 - beyond_i)``.

    Without ``beyond`` every ``k_i`` is 1: the paper's merging coefficients, which sum to 1 as ``mu`` does. Where ``mu``
    is more extreme than the rewards of every backbone some are negative. ``extrapolate=False``, which is not in the
    paper, sets these to 0 and scales the rest to the same sum.

    ``beyond`` [n], each from 0 to below 1: the authors' extrapolation (github.com/andyclsr/BoneSoups,
    ppo/BoneSoups.py). The model of reward ``i`` alone goes ``k_i`` times as far from the base model as its merge does,
    and ``mu`` mixes these. The weights sum to ``sum_i k_i mu_i``, and the base model has what is missing to 1, a
    negative number.
    """
    asked = torch.tensor(list(mu), dtype=torch.float64)
    far = asked / (1 - torch.tensor(list(beyond or [0.0] * len(asked)), dtype=torch.float64))
    found = torch.linalg.solve(b, far)
    if not extrapolate:
        found = found.clamp(min=0)
        found = found * (far.sum() / asked.sum() / found.sum())
    return [round(weight, 12) for weight in found.tolist()]  # 0 where it is 0 but for rounding


def guaranteed_interval(beta: float) -> Point:
    """The ``mu`` of one of two rewards, as an open interval, where Bone Soup beats Rewarded Soup (Theorem 1).

    The theorem is of two quadratic rewards with different curvatures, for backbones that are optimal. The interval
    holds for all curvatures; the more these differ, the larger the one in which the bone soup really is better.
    """
    half = math.sqrt(2 * beta**2 - 2 * beta + 1) / 2
    return 0.5 - half, 0.5 + half


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one is at least as good as in both rewards, by rising first reward."""
    front: list[Point] = []
    for point in sorted(set(points), reverse=True):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front[::-1]


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """The area that is worse than a point and better than ``reference`` in both rewards; exact. More is better."""
    area, left = 0.0, reference[0]
    for x, y in pareto_front([p for p in points if p[0] > reference[0] and p[1] > reference[1]]):
        area += (x - left) * (y - reference[1])
        left = x
    return area


def controllability(points: Sequence[Point]) -> float:
    """How well ``mu`` controls the rewards: ``points`` are in the order in which ``mu`` of the first reward rises.

    mmrl's own definition: the share of neighbours of which the first reward rises and the second falls. NaN below two
    points.
    """
    pairs = list(itertools.pairwise(points))
    return sum(a[0] < b[0] and a[1] > b[1] for a, b in pairs) / len(pairs) if pairs else math.nan


def sparsity(points: Sequence[Point]) -> float:
    """Mean squared distance of neighbours on the Pareto front (PGMORL, ICML 2020); less is denser. NaN for a point."""
    front = pareto_front(points)
    gaps = [(b[0] - a[0]) ** 2 + (b[1] - a[1]) ** 2 for a, b in itertools.pairwise(front)]
    return sum(gaps) / len(gaps) if gaps else math.nan
