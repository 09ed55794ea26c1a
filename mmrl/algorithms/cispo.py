"""CISPO: the ratio is a clipped, detached weight, so no token loses its gradient (arXiv 2506.13585, eq. 4).

    L = -min(ratio, ratio_max) A log policy,   no gradient through the ratio

There is no lower bound, as in the paper. ``policy/clip_fraction`` counts clipped weights, whatever the advantage.
"""

from __future__ import annotations

import torch
from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.policy_gradient import Surrogate, TokenObjective
from mmrl.config.algorithm_settings import AdvantageAggregation, AggregationMode, Spread, TurnSettings


class CISPOSettings(TurnSettings):
    """Clipped importance weights, no token dropped (MiniMax-M1, arXiv 2506.13585)."""

    aggregation: AggregationMode = "token_mean"
    advantage_std: Spread = "group"
    advantage_aggregation: AdvantageAggregation = "sum"
    ratio_max: PositiveFloat = 5.0
    """Upper bound of the detached ratio (1 + the paper's epsilon high, which it does not give; ScaleRL, arXiv
    2510.13786, recommends 5). There is no lower bound, as in the paper."""


class CISPO(TokenObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``."""

    def __init__(self, settings: CISPOSettings) -> None:
        super().__init__(settings, settings.aggregation)
        self.ratio_max = settings.ratio_max

    def surrogate(self, log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        ratio = log_ratio.detach().exp()
        cut = ratio > self.ratio_max
        loss = -ratio.clamp(max=self.ratio_max) * advantages * log_probs
        return Surrogate(loss, ratio, torch.zeros_like(cut), cut)
