"""GRPO: group advantages and a clipped ratio per token (Shao et al. 2024, arXiv 2402.03300, eq. 3).

    A = (r - mean of its group) / (std + 1e-4)
    L = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)) + kl_coef k3

Departs: standard deviations are the population's; TRL and verl take the sample's. With ``mask_truncated`` cut
responses are left out of the loss's mean, too. The entropy bonus is averaged as the loss is.
"""

from __future__ import annotations

from mmrl.algorithms.policy_gradient import ClippedObjective
from mmrl.config.algorithm_settings import AdvantageAggregation, AggregationMode, ClippedSettings, Spread, TurnSettings
from mmrl.config.section import NonNegative


class GRPOSettings(ClippedSettings, TurnSettings):
    """Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300).

    TRL's GRPOTrainer (1.16) has other defaults: kl_coef 0 and aggregation token_mean (its loss_type "dapo").
    """

    aggregation: AggregationMode = "seq_mean_token_mean"
    advantage_std: Spread = "group"
    advantage_aggregation: AdvantageAggregation = "sum"
    kl_coef: NonNegative = 0.04


class GRPO(ClippedObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``."""

    def __init__(self, settings: GRPOSettings) -> None:
        super().__init__(settings, settings.aggregation)
