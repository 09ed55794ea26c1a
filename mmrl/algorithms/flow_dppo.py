"""Flow-DPPO: the exact divergence of a step, not its ratio, says when it has moved far enough (arXiv 2606.11025).

    L = -A r,   0 where D >= max_divergence and (r > 1 and A > 0, or r < 1 and A < 0),   D = |mu - mu_old|^2 / (2 std^2)

A ratio is one sample's noisy estimate of the divergence; of two Gaussians of equal spread it is known.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mmrl.algorithms.denoising import DenoisingObjective, StepLoss
from mmrl.config.picture_algorithms import FlowDPPO


class Objective(DenoisingObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``. ``new`` holds old_distance ``[B, T]`` too."""

    def __init__(self, settings: FlowDPPO) -> None:
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
