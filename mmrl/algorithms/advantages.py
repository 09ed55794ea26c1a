"""Group advantages: a sample is judged against the other samples of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.config.algorithm_settings import Spread

EPSILON = 1e-4
"""Added to a standard deviation that advantages are divided by."""

AllSum = Callable[[Tensor], Tensor]
"""Sums a small float64 tensor over all controllers. Each must call it equally often, also with no rows to add."""


def alone(values: Tensor) -> Tensor:
    """The ``AllSum`` of a single controller."""
    return values


@dataclass(frozen=True)
class Advantages:
    """``values`` ``[B]``, or ``[B, T]`` of tokens, float32 (0 where the reward is missing); ``valid`` ``[B]``.

    The counts are of the batch's groups. ``returns`` ``[B, T]`` float32 are the critic's targets; ``metrics`` are means
    for the log.
    """

    values: Tensor
    valid: Tensor
    groups: int
    zero_std_groups: int
    returns: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupStatistics:
    """Mean, population variance and number of the valid samples of every group, ``[G]`` float64 each."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    @property
    def flat(self) -> Tensor:
        """``[G]`` bool: fewer than two values, or all equal.

        Equal rewards can differ from their mean by rounding; such a difference counts as 0.
        """
        return (self.variance.sqrt() <= 1e-9 * self.mean.abs().clamp(min=1.0)) | (self.count < 2)


def group_statistics(values: Tensor, weights: Tensor, groups: Tensor) -> GroupStatistics:
    """Statistics of ``values`` ``[N]`` with ``weights`` ``[N]`` (0 leaves a value out) in ``groups`` ``[N]`` integers.

    Groups are numbered from 0; a value that is left out may be anything, NaN too.
    """
    n_groups = int(groups.max()) + 1 if len(groups) else 0
    empty = torch.zeros(n_groups, dtype=torch.double, device=values.device)
    w = weights.double()
    v = torch.where(w > 0, values.double(), 0.0)
    count = empty.index_add(0, groups, w)
    mean = empty.index_add(0, groups, v * w) / count.clamp(min=1)
    variance = empty.index_add(0, groups, (v - mean[groups]).square() * w) / count.clamp(min=1)
    return GroupStatistics(mean, variance, count)


def batch_statistics(values: Tensor, weights: Tensor, all_sum: AllSum = alone) -> tuple[Tensor, Tensor]:
    """Mean and population variance of ``values`` where ``weights`` (same shape) are above 0, over all controllers.

    float64 scalars, 0 without values. Two passes: squares of values that are not centred would lose the digits of a
    small variance. A value that is left out may be anything, NaN too.
    """
    w = weights.double()
    v = torch.where(w > 0, values.double(), 0.0)
    count, total = all_sum(torch.stack([w.sum(), (v * w).sum()])).unbind()
    count = count.clamp(min=1)
    mean = total / count
    return mean, all_sum(((v - mean).square() * w).sum()) / count


def flat_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """``[G]`` bool: groups without a learning signal: their valid rewards ``[B]`` are all equal or fewer than two.

    Dynamic sampling replaces these groups (DAPO, arXiv 2503.14476, sec. 3.2).
    """
    return group_statistics(rewards, torch.isfinite(rewards), groups).flat


def group_advantages(rewards: Tensor, groups: Tensor, std: Spread, all_sum: AllSum = alone) -> Advantages:
    """``(r - mean of its group) / (std + 1e-4)`` (GRPO, arXiv 2402.03300, sec. 4.1.2).

    ``rewards`` ``[B]``, NaN where a sample was dropped; ``groups`` ``[B]`` integers. ``std``: of the group, of the
    batch (Flow-GRPO's ``global_std``), or no division (Dr.GRPO). Population standard deviations. A group whose rewards
    are all equal, or with fewer than two valid samples, has advantage 0 and is counted. All samples of a group must be
    in ``rewards``; ``all_sum`` sums the statistics of the batch over all controllers.
    """
    valid = torch.isfinite(rewards)
    stats = group_statistics(rewards, valid, groups)
    r = torch.where(valid, rewards.double(), 0.0)
    centred = torch.where(valid, r - stats.mean[groups], 0.0)
    values = torch.where(stats.flat[groups], 0.0, centred / scale(rewards, groups, std, all_sum))
    return Advantages(values.float(), valid, len(stats.flat), int(stats.flat.sum()))


def scale(values: Tensor, groups: Tensor, std: Spread, all_sum: AllSum = alone) -> Tensor:
    """What ``values`` are divided by, float64: their standard deviation ``std`` plus 1e-4, or 1. ``groups`` are
    integers, in the same shape; a value that is not finite counts in none."""
    valid = torch.isfinite(values)
    if std == "group":
        return group_statistics(values.flatten(), valid.flatten(), groups.flatten()).variance.sqrt()[groups] + EPSILON
    if std == "batch":
        return batch_statistics(values, valid, all_sum)[1].sqrt() + EPSILON
    return torch.tensor(1.0, dtype=torch.double)


def uneven(of: Advantages, groups: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The valid rows of each group that has any advantage ``of`` ``[B]``, and their advantages."""
    for rows in (torch.nonzero((groups == g) & of.valid).flatten() for g in groups.unique()):
        if of.values[rows].any():
            yield rows, of.values[rows]


def leave_one_out(rewards: Tensor, groups: Tensor) -> Advantages:
    """``r - mean of the others of its group`` (RLOO, arXiv 2402.14740, eq. 8): ``(r - mean) n / (n - 1)``."""
    plain = group_advantages(rewards, groups, "none")
    count = group_statistics(rewards, plain.valid, groups).count[groups]
    values = plain.values.double() * count / (count - 1).clamp(min=1)
    return Advantages(values.float(), plain.valid, plain.groups, plain.zero_std_groups)


def token_group_advantages(rewards: Tensor, mask: Tensor, groups: Tensor) -> tuple[Tensor, int, int]:
    """``(R - mean) / (std + 1e-4)`` over all tokens of all responses of a group (CAPO, arXiv 2508.02298).

    ``rewards`` ``[B, T]``, ``mask`` ``[B, T]``, 0 on padding and on rows left out, where ``rewards`` may be NaN.
    Returns ``[B, T]`` float32, the number of groups and how many of them are flat (their advantages are 0).
    """
    index = groups.unsqueeze(1).expand_as(rewards).flatten()
    stats = group_statistics(rewards.flatten(), mask.flatten(), index)
    scaled = (rewards.double() - stats.mean[groups].unsqueeze(1)) / (
        stats.variance.sqrt()[groups].unsqueeze(1) + EPSILON
    )
    flat = stats.flat
    values = torch.where((mask > 0) & ~flat[groups].unsqueeze(1), scaled, 0.0)
    return values.float(), len(flat), int(flat.sum())
