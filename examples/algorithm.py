"""SAPO: a smooth gate in place of a clipped ratio (Gao et al. 2025, arXiv 2511.20347).

    L = -A f(r),   f(r) = 4 / tau sigmoid(tau (r - 1)),   tau = tau_positive where A > 0, else tau_negative

At r = 1 the slope of f is 1, so the first update is the policy gradient's; far from 1 the gradient fades.
"""

from __future__ import annotations

import torch
from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.advantages import Advantages, group_advantages
from mmrl.algorithms.objective import Scored
from mmrl.algorithms.policy_gradient import Surrogate, TokenObjective
from mmrl.config.algorithm_settings import Spread, TokenSettings


class SAPOSettings(TokenSettings):
    """Soft adaptive policy optimisation: the settings of the section ``algorithm``."""

    tau_positive: PositiveFloat = 1.0
    tau_negative: PositiveFloat = 1.05
    """Larger than tau_positive: gradients of what is to become less likely fade sooner."""
    advantage_std: Spread = "group"


class SAPO(TokenObjective):
    """See ``mmrl.algorithms.objective.PolicyGradient``; ``TokenObjective`` has the loss around the surrogate."""

    def __init__(self, settings: SAPOSettings) -> None:
        super().__init__(settings, "token_mean")
        self.taus = (settings.tau_positive, settings.tau_negative)
        self.advantage_std: Spread = settings.advantage_std

    def advantages(self, scored: Scored) -> Advantages:
        return group_advantages(scored.rewards, scored.groups, self.advantage_std, scored.all_sum)

    def surrogate(self, log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        ratio = log_ratio.exp()
        tau = torch.where(advantages > 0, self.taus[0], self.taus[1])
        gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
        never = torch.zeros_like(ratio, dtype=torch.bool)  # nothing is clipped
        return Surrogate(-advantages * gate, ratio, never, never)
