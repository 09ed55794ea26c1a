"""Reward-weighted regression: flow matching on the run's own samples, weighted by reward (Lee et al., 2302.12192).

    L = w mean (v - (eps - x0))^2 + kl_coef mean (v - v_ref)^2
    softmax: w = K softmax over its group of (r - mean) / (std temperature),   best: w = 1 for its group's best alone

``best`` is the supervised fine-tuning (SFT) that Flow-GRPO compares itself with.

Departs: weights are normalised within a group, not over the batch, so that easy prompts do not dominate; a group whose
rewards are all equal is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.advantages import Advantages, group_advantages, uneven
from mmrl.algorithms.forward_process import ForwardObjective
from mmrl.algorithms.objective import Scored
from mmrl.algorithms.sde import squared_distance
from mmrl.config.algorithm_settings import ForwardSettings
from mmrl.config.section import NonNegative


class RWRSettings(ForwardSettings):
    """Reward-weighted fine-tuning on the run's own samples (Lee et al. 2023, arXiv 2302.12192)."""

    weights: Literal["softmax", "best"] = "softmax"
    """``softmax``: a sample's weight is the softmax over its group's standardised rewards; ``best``: only the best
    sample of each group trains (SFT on own samples)."""
    temperature: PositiveFloat = 1.0
    """Temperature of the softmax, in standard deviations of the group."""
    kl_coef: NonNegative = 0.0
    """Weight of the squared distance to the reference's velocity."""


class RWR(ForwardObjective):
    """Final class; see ``mmrl.algorithms.objective.ForwardProcess``. Advantages are the weights, 0 or more."""

    def __init__(self, settings: RWRSettings) -> None:
        super().__init__(settings.noise_levels, settings.kl_coef, frozenset({"v", "target"}))
        self.best, self.temperature = settings.weights == "best", settings.temperature

    def advantages(self, scored: Scored) -> Advantages:
        plain = group_advantages(scored.rewards, scored.groups, "group")
        values = torch.zeros_like(plain.values)
        for rows, inside in uneven(plain, scored.groups):
            if self.best:
                values[rows[inside.argmax()]] = 1.0
            else:
                values[rows] = len(rows) * (inside / self.temperature).softmax(0)
        return Advantages(values, values > 0, plain.groups, plain.zero_std_groups)

    def losses(
        self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        error = squared_distance(new["v"], new["target"])
        return old["advantages"] * error, {"policy/matching": error}, {}
