"""GSPO: one ratio per response, the geometric mean over its tokens, clipped as a whole (arXiv 2507.18071, eq. 5 and 7).

    s = exp(mean_t log ratio_t),   L = mean over responses of max(-A s, -A clip(s, 1 - low, 1 + high))

The clip ranges apply to a mean over tokens and are about a thousandth of a token's. ``policy/ratio`` is ``s``;
``policy/ratio_max_dev`` is that of the tokens' ratios, as a check of replay.

Departs: an engine's importance weights of tokens weigh the tokens' shares of a response's loss, as in TRL; verl's
gradient with such weights is another one.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat
from torch import Tensor

from mmrl.algorithms.policy_gradient import ClippedObjective, Surrogate, clipped_surrogate
from mmrl.config.algorithm_settings import AdvantageAggregation, ClippedSettings, Spread


class GSPOSettings(ClippedSettings):
    """Group sequence policy optimisation: one length-normalised ratio a response (Zheng et al. 2025, 2507.18071)."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
    clip_high: PositiveFloat = 4e-4
    advantage_std: Spread = "group"
    advantage_aggregation: AdvantageAggregation = "sum"


class GSPO(ClippedObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``."""

    def __init__(self, settings: GSPOSettings) -> None:
        super().__init__(settings)

    def surrogate(self, log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return clipped_surrogate(mean, advantages, *self.clip)
