"""Dr.GRPO: GRPO without the division by the group's spread and by the response's length (arXiv 2503.20783, sec. 3).

    A = r - mean of its group
    L = max(-A ratio, -A clip(ratio)), summed over a response's tokens and divided by the length limit

The limit is the same for all responses. The paper leaves this constant open; TRL chooses the same.
"""

from __future__ import annotations

from mmrl.algorithms.policy_gradient import ClippedObjective
from mmrl.config.algorithm_settings import AggregationMode, ClippedSettings, Spread, TurnSettings


class DrGRPOSettings(ClippedSettings, TurnSettings):
    """GRPO without its biases of length and difficulty (Liu et al. 2025, arXiv 2503.20783)."""

    aggregation: AggregationMode = "seq_mean_token_sum_norm"


class DrGRPO(ClippedObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``."""

    advantage_std: Spread = "none"

    def __init__(self, settings: DrGRPOSettings) -> None:
        super().__init__(settings, settings.aggregation)
