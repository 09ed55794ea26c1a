"""Stepwise-Flow-GRPO: a denoising step's advantage is what it gained in reward (Savani et al. 2026, arXiv 2603.28718).

    g_t = r(x0 predicted after step t) - r(x0 predicted before it),   x0 predicted = x_s - s v
    A_t = (g_t - mean) / std,   L = max(-A_t r_t, -A_t clip(r_t, 1 - clip_range, 1 + clip_range))

The mean and the standard deviation are over all recorded steps of all samples of a group, so that steps which gain more
count more. The result before each recorded step is predicted with the velocity that the step takes anyway, decoded and
scored; after the last recorded step the finished sample is scored. So the gains of a sample add up to its reward less
that of the first prediction.

Departs: a prediction is one evaluation of the model; the paper denoises 5 further steps without noise for each. Where
the samples of a group gain the same at every step, their advantages are 0. The paper's DDIM-like noise, whose size is
eta s' sqrt(1 - s), is not here; ``sampling.sde: cps`` has the same form with a size proportional to s'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.advantages import Advantages, AllSum, alone, group_statistics, scale
from mmrl.algorithms.denoising import DenoisingObjective, StepLoss
from mmrl.algorithms.objective import Scored
from mmrl.algorithms.policy_gradient import clipped_surrogate
from mmrl.config.algorithm_settings import Spread, StepSettings
from mmrl.config.sampling import Sampling, TextSampling


class StepwiseFlowGRPOSettings(StepSettings):
    """Flow-GRPO with the gain in reward of each step as its advantage (Savani et al. 2026, arXiv 2603.28718)."""

    scores_steps: ClassVar[bool] = True
    clip_range: PositiveFloat = 1e-4
    """Ratios are clipped to 1 plus and minus this."""
    advantage_std: Spread = "group"
    """What gains are divided by: the standard deviation of their group's, of the batch's, or nothing."""
    centre: Literal["joint", "step"] = "joint"
    """The mean that a gain is compared with: of all steps of the group (the paper), or of the group at that step. With
    ``joint`` a step that gains more in every sample is reinforced in every sample, which is noise; take ``step`` with a
    window of few steps."""

    def conflicts(self, sampling: Sampling | TextSampling) -> Iterator[str]:
        yield from super().conflicts(sampling)
        if self.advantage_aggregation != "sum":
            yield (
                "algorithm.advantage_aggregation: the gain of a step is that of the sum of the rewards; set it to sum, "
                "or algorithm.type to flow_grpo"
            )


class StepwiseFlowGRPO(DenoisingObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``."""

    def __init__(self, settings: StepwiseFlowGRPOSettings) -> None:
        super().__init__(settings)
        self.clip_range = settings.clip_range
        self.centre: Literal["joint", "step"] = settings.centre

    def advantages(self, scored: Scored) -> Advantages:
        """``[B, T]``, one of each recorded step."""
        assert scored.step_rewards is not None
        return gain_advantages(
            scored.step_rewards, scored.rewards, scored.groups, self.advantage_std, self.centre, scored.all_sum
        )

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
    ) -> StepLoss:
        clipped = clipped_surrogate(log_ratio, advantages, self.clip_range, self.clip_range)
        return StepLoss(clipped.loss, clipped.ratio, (clipped.ratio - 1).abs() > self.clip_range, {})


def gain_advantages(
    before: Tensor,
    rewards: Tensor,
    groups: Tensor,
    std: Spread,
    centre: Literal["joint", "step"],
    all_sum: AllSum = alone,
) -> Advantages:
    """The advantages ``[B, T]`` of steps from the rewards ``before`` ``[B, T]`` of the results that were predicted
    before each of them, and those of the finished samples, ``rewards`` ``[B]``; both float64, NaN where one is missing:
    such a sample is left out. ``groups`` ``[B]`` integers. Population standard deviations, plus 1e-4."""
    gains = torch.cat([before[:, 1:], rewards.unsqueeze(1)], 1) - before
    valid = gains.isfinite().all(1)
    gains = torch.where(valid.unsqueeze(1), gains, torch.nan)
    steps = gains.shape[1]
    of_step = groups.unsqueeze(1) * steps + torch.arange(steps, device=groups.device)
    at_step = group_statistics(gains.flatten(), gains.isfinite().flatten(), of_step.flatten())
    flat = at_step.flat.view(-1, steps).all(1)
    index = groups.unsqueeze(1).expand(-1, steps)
    joint = group_statistics(gains.flatten(), gains.isfinite().flatten(), index.flatten())
    mean = joint.mean[index] if centre == "joint" else at_step.mean[of_step]
    centred = gains - mean
    kept = valid.unsqueeze(1) & ~flat[index]
    values = torch.where(kept, centred / scale(centred, index, std, all_sum), 0.0)
    sizes = gains.abs().nanmean(0).nan_to_num()
    metrics = {"advantage/first_gain": float(sizes[0]), "advantage/last_gain": float(sizes[-1])}
    return Advantages(values.float(), valid, len(flat), int(flat.sum()), metrics=metrics)
