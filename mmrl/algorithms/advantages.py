"""Group advantages: a sample is judged against the other samples of its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_EPSILON = 1e-4


@dataclass(frozen=True)
class Advantages:
    """``values`` ``[B]`` float32 (0 where the reward is missing); ``valid`` ``[B]``; counts over the batch's groups."""

    values: Tensor
    valid: Tensor
    groups: int
    zero_std_groups: int


def group_advantages(rewards: Tensor, groups: Tensor, std: Literal["group", "batch", "none"]) -> Advantages:
    """``(r - mean of its group) / (std + 1e-4)`` (GRPO, arXiv 2402.03300, sec. 4.1.2).

    ``rewards`` ``[B]``, NaN where a sample was dropped; ``groups`` ``[B]`` integers. ``std``: of the group, of the
    batch (Flow-GRPO's ``global_std``), or no division (Dr.GRPO). Population standard deviations. A group whose rewards
    are all equal, or with fewer than two valid samples, has advantage 0 and is counted.
    """
    valid = torch.isfinite(rewards)
    r = torch.where(valid, rewards.double(), 0.0)
    n_groups = int(groups.max()) + 1 if len(groups) else 0
    count = torch.zeros(n_groups, dtype=torch.double).index_add_(0, groups, valid.double())
    mean = torch.zeros(n_groups, dtype=torch.double).index_add_(0, groups, r) / count.clamp(min=1)
    centred = torch.where(valid, r - mean[groups], 0.0)
    variance = torch.zeros(n_groups, dtype=torch.double).index_add_(0, groups, centred.square()) / count.clamp(min=1)
    # Equal rewards can differ from their mean in the last digit; that is no signal.
    flat = variance.sqrt() <= 1e-9 * mean.abs().clamp(min=1.0)
    flat |= count < 2
    if std == "group":
        scale = variance.sqrt()[groups] + _EPSILON
    elif std == "batch":
        scale = (r[valid].std(correction=0) if valid.any() else torch.tensor(0.0)) + _EPSILON
    else:
        scale = torch.tensor(1.0, dtype=torch.double)
    values = torch.where(flat[groups], 0.0, centred / scale)
    return Advantages(values.float(), valid, n_groups, int(flat.sum()))
