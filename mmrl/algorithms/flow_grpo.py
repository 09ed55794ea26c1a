"""Flow-GRPO: the clipped policy gradient over denoising steps (Liu et al. 2025, arXiv 2505.05470, eq. 5).

    L = w max(-A r, -A clip(r, 1 - clip_range, 1 + clip_range)),   r = exp(log p - log p_old)

``w`` is 1, or one of two weights of steps (``step_weight``): ``tempflow`` is 2.25 std, so that noisier steps, where
samples differ most, count more; ``flash`` is std / |c_v| divided by its mean over all steps that may be trained, which
removes the factor by which a step's mean moves with the velocity from its gradient.

Departs: Flash-GRPO's authors draw a step for every prompt and divide by the mean over the steps of a batch; here all
prompts of a training step share one window, and the mean is that over all steps. TempFlow's branches are a window of
one step, with separate noise per sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.denoising import DenoisingObjective, StepLoss
from mmrl.algorithms.policy_gradient import clipped_surrogate
from mmrl.config.algorithm_settings import StepSettings

TEMPFLOW_SCALE = 2.25
"""UniRL's scale of TempFlow's weights, which makes them about 1 on average."""


class FlowGRPOSettings(StepSettings):
    """Clipped policy gradient over denoising steps (Liu et al. 2025, arXiv 2505.05470)."""

    clip_range: PositiveFloat = 1e-4
    """Ratios are clipped to 1 plus and minus this."""
    step_weight: Literal["none", "tempflow", "flash"] = "none"
    """A step's loss is multiplied by 2.25 std, its noise (TempFlow-GRPO, arXiv 2508.04324), or by std / |c_v|, which
    makes all steps' gradients alike, over its mean (Flash-GRPO, arXiv 2605.15980)."""


class FlowGRPO(DenoisingObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``."""

    def __init__(self, settings: FlowGRPOSettings) -> None:
        super().__init__(settings)
        self.clip_range, self.step_weight = settings.clip_range, settings.step_weight

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
    ) -> StepLoss:
        clipped = clipped_surrogate(log_ratio, advantages, self.clip_range, self.clip_range)
        loss = clipped.loss
        if self.step_weight == "tempflow":
            loss = loss * TEMPFLOW_SCALE * old["std"]
        elif self.step_weight == "flash":
            mean = (old["every_std"] / old["every_c_v"].abs()).mean()
            loss = loss * old["std"] / old["c_v"].abs() / mean
        return StepLoss(loss, clipped.ratio, (clipped.ratio - 1).abs() > self.clip_range, {})
