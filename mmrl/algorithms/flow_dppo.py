"""Flow-DPPO: the exact divergence of a step replaces the clipped ratio as the trust region (arXiv 2606.11025).

    L = -A r,   0 where D >= max_divergence and (r > 1 and A > 0, or r < 1 and A < 0),   D = |mu - mu_old|^2 / (2 std^2)

A ratio is a noisy estimate of the divergence from one sample; for two Gaussians of equal spread it is known exactly.

Departs: advantages are limited to ``advantage_clip`` (5), as in Flow-GRPO; the authors do not limit them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.denoising import DenoisingObjective, StepLoss
from mmrl.config.algorithm_settings import StepSettings
from mmrl.config.section import NonNegative


class FlowDPPOSettings(StepSettings):
    """A denoising step beyond max_divergence that would move further is left out; no clip (Flow-DPPO)."""

    takes_older_samples: ClassVar[bool] = False
    exact_replay: ClassVar[bool] = True
    max_divergence: PositiveFloat = 1e-5
    """KL divergence of a step's Gaussian from that of the policy that sampled, mean per latent dimension."""
    kl_coef: NonNegative = 0.0


class FlowDPPO(DenoisingObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``. ``new`` holds old_distance ``[B, T]`` too."""

    def __init__(self, settings: FlowDPPOSettings) -> None:
        super().__init__(settings, frozenset({"old_distance"}))
        self.max_divergence = settings.max_divergence

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
    ) -> StepLoss:
        divergence = new["old_distance"].detach() / (2 * old["std"].square())
        away = log_ratio.detach() * advantages > 0
        left_out = (divergence >= self.max_divergence) & away
        ratio = log_ratio.exp()
        return StepLoss(-advantages * ratio * ~left_out, ratio, left_out, {"policy/old_kl": divergence})
