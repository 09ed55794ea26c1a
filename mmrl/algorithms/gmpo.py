"""GMPO: the geometric mean of a response's token ratios, each clipped in log space (arXiv 2507.20673, eq. 4).

    x_t = log ratio_t,  c_t = clip(x_t, -clip_low, clip_high),  m_t = min(x_t, c_t) where A > 0, max(x_t, c_t) else
    L = mean over responses of -A exp(mean_t m_t)

As the authors' code (and verl's and TRL's): the clip ranges are of logarithms, 0.4 each way, wider than GRPO's.
``policy/ratio`` is the geometric mean.

Departs: verl takes the geometric mean of an engine's importance weights over a response's tokens; here each weighs its
token's equal share of the response's loss.
"""

from __future__ import annotations

import torch
from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.policy_gradient import Surrogate, TokenObjective
from mmrl.config.algorithm_settings import AdvantageAggregation, Spread, TokenSettings


class GMPOSettings(TokenSettings):
    """Geometric-mean policy optimisation (Zhao et al. 2025, arXiv 2507.20673)."""

    clip_low: PositiveFloat = 0.4
    """Clip range of the log ratio of a token: the ratio is clipped at ``exp(-clip_low)``."""
    clip_high: PositiveFloat = 0.4
    """The ratio is clipped at ``exp(clip_high)``."""
    advantage_std: Spread = "group"
    advantage_aggregation: AdvantageAggregation = "sum"


class GMPO(TokenObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``."""

    def __init__(self, settings: GMPOSettings) -> None:
        super().__init__(settings)
        self.low, self.high = settings.clip_low, settings.clip_high

    def surrogate(self, log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        better = advantages > 0
        clipped = log_ratio.clamp(-self.low, self.high)
        taken = torch.where(better, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
        mean = (taken * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        at = log_ratio.detach()
        low, high = (at < -self.low) & (advantages < 0), (at > self.high) & better
        return Surrogate(-advantages * mean.exp(), mean.exp(), low, high)
