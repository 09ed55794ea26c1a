"""REINFORCE++: advantages whitened over the whole batch, not inside groups (Hu et al. 2025, arXiv 2501.03262).

    plain:    A_t = r - kl_coef sum over i >= t of log(policy_i / reference_i)
    baseline: A = r - mean of its group, and kl_coef k2 in the loss
    L = mean over all tokens of max(-A ratio, -A clip(ratio)), A whitened over the batch's tokens

Equations 3 and 4. With gamma < 1, and with rewards of single tokens, plain takes the discounted reward-to-go; k2 is
Schulman's.

The batch is that of all controllers. Statistics are over tokens, so that longer responses weigh more, as in verl.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmrl.algorithms.advantages import Advantages, flat_groups, group_advantages
from mmrl.algorithms.objective import Scored
from mmrl.algorithms.policy_gradient import LOG_RATIO_BOUND, ClippedObjective
from mmrl.algorithms.returns import reward_to_go, token_rewards, whiten
from mmrl.config.algorithm_settings import AggregationMode, ClippedSettings
from mmrl.config.section import Fraction, NonNegative


class ReinforcePPSettings(ClippedSettings):
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262), with or without the group baseline."""

    variant: Literal["plain", "baseline"] = "plain"
    """``plain``: each token's divergence is subtracted from its reward; a group of 1 is enough. ``baseline``: the
    group's mean is subtracted from the reward first, and the divergence (k2) is a term of the loss."""
    aggregation: AggregationMode = "token_mean"
    kl_coef: NonNegative = 0.01
    gamma: Fraction = 1.0
    """Discount of a reward for each token that lies before it."""

    uses_token_rewards: ClassVar[bool] = True
    divergence_in_loss: ClassVar[bool] = False

    @property
    def compares_group(self) -> bool:
        return self.variant == "baseline"


class ReinforcePP(ClippedObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``."""

    def __init__(self, settings: ReinforcePPSettings) -> None:
        self.baseline = settings.variant == "baseline"
        super().__init__(settings, settings.aggregation, kl_in_loss=self.baseline)
        self.gamma = settings.gamma

    def advantages(self, scored: Scored) -> Advantages:
        mask = scored.mask
        assert mask is not None
        valid, flat = torch.isfinite(scored.rewards), flat_groups(scored.rewards, scored.groups)
        if self.baseline:
            scored = replace(scored, rewards=group_advantages(scored.rewards, scored.groups, "none").values.double())
        rewards, metrics = token_rewards(scored, self.reward_kl_coef)
        returns = reward_to_go(rewards, mask, self.gamma)
        values = whiten(returns, mask * valid.unsqueeze(1), scored.all_sum)
        return Advantages(values.float(), valid, len(flat), int(flat.sum()), metrics=metrics)

    def terms(
        self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], inside: Tensor
    ) -> dict[str, tuple[float, Tensor]]:
        out = super().terms(new, old, inside)
        if self.baseline and "reference_log_probs" in new:
            d = torch.where(inside, new["log_probs"] - new["reference_log_probs"], 0.0)
            out["policy/kl"] = (0.0, out["policy/kl"][1].detach())
            out["policy/kl_k2"] = (self.kl_coef, 0.5 * d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).square())
        return out
