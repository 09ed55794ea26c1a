"""SAPO: a smooth gate in place of the clip (arXiv 2511.20347, eq. 5 and 6).

    L = -A sigmoid(tau (ratio - 1)) 4 / tau,   tau: tau_pos where A > 0, else tau_neg

The gate's slope at ratio 1 is 1, so that the first gradient is that of the policy gradient; far from 1 it vanishes
without a kink. Nothing is clipped: ``policy/clip_fraction`` is 0.
"""

from __future__ import annotations

import torch
from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.policy_gradient import Surrogate, TokenObjective
from mmrl.config.algorithm_settings import AdvantageAggregation, AggregationMode, Spread, TurnSettings


class SAPOSettings(TurnSettings):
    """Soft adaptive policy optimisation (Gao et al. 2025, arXiv 2511.20347)."""

    aggregation: AggregationMode = "seq_mean_token_mean"
    advantage_std: Spread = "group"
    advantage_aggregation: AdvantageAggregation = "sum"
    tau_pos: PositiveFloat = 1.0
    """Temperature of the gate where the advantage is positive. TRL calls it ``sapo_temperature_pos``."""
    tau_neg: PositiveFloat = 1.05
    """Temperature elsewhere: a larger one makes the gate narrower. TRL calls it ``sapo_temperature_neg``."""


class SAPO(TokenObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``."""

    def __init__(self, settings: SAPOSettings) -> None:
        super().__init__(settings, settings.aggregation)
        self.tau_pos, self.tau_neg = settings.tau_pos, settings.tau_neg

    def surrogate(self, log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        ratio = log_ratio.exp()
        tau = torch.full_like(advantages, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
        never = torch.zeros_like(ratio, dtype=torch.bool)
        return Surrogate(loss, ratio, never, never)
