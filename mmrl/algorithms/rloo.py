"""RLOO: REINFORCE with a leave-one-out baseline, a whole response as one action (arXiv 2402.14740, eq. 8).

    A = r' - mean of r' of the others of its group,   r' = r - kl_coef log(policy / reference) of the response
    L = max(-A ratio, -A clip(ratio)), with the ratio of the whole response

The paper takes one step on fresh samples, where the ratio is 1. For further updates the response's ratio, the product
over its tokens, is clipped as in TRL's RLOOTrainer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from mmrl.algorithms.advantages import Advantages, leave_one_out
from mmrl.algorithms.objective import Scored
from mmrl.algorithms.policy_gradient import LOG_RATIO_BOUND, ClippedObjective, Surrogate, clipped_surrogate
from mmrl.algorithms.returns import penalised_rewards
from mmrl.config.algorithm_settings import ClippedSettings
from mmrl.config.section import NonNegative


class RLOOSettings(ClippedSettings):
    """REINFORCE with a leave-one-out baseline, a response as one action (Ahmadian et al. 2024, arXiv 2402.14740)."""

    divergence_in_loss: ClassVar[bool] = False
    kl_coef: NonNegative = 0.05
    """Weight of the response's divergence, which is subtracted from its reward (TRL's default)."""


class RLOO(ClippedObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``."""

    def __init__(self, settings: RLOOSettings) -> None:
        super().__init__(settings, kl_in_loss=False)

    def advantages(self, scored: Scored) -> Advantages:
        rewards, metrics = penalised_rewards(scored, self.reward_kl_coef)
        return replace(leave_one_out(rewards, scored.groups), metrics=metrics)

    def surrogate(self, log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        return clipped_surrogate(
            log_ratio.sum(1, keepdim=True).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), advantages, *self.clip
        )
