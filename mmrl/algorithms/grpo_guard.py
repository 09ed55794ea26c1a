"""GRPO-Guard: Flow-GRPO with ratios that are centred and of one scale at every step (Wang et al. 2025, 2510.22319).

    r = exp(std [log p - log p_old + |mu - mu_old|^2 / (2 std^2)]) = exp(mean(z (mu - mu_old)))
    L = max(-A r, -A clip(r, 1 - clip_range, 1 + clip_range)) / -dt

A plain ratio is below 1 on average, by an amount that differs between steps, so that its clip range acts on one side
only. The added term removes that bias, the factor ``std`` makes the spread of all steps equal, and ``1 / -dt`` makes
their gradients equal. ``z`` is the noise that was drawn.

Departs: means are over each sample's own dimensions; the authors' code takes them over the batch as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.denoising import DenoisingObjective, StepLoss
from mmrl.algorithms.policy_gradient import clipped_surrogate
from mmrl.config.algorithm_settings import StepSettings
from mmrl.config.sampling import Sampling, TextSampling
from mmrl.config.section import NonNegative


class GRPOGuardSettings(StepSettings):
    """Flow-GRPO with ratios of one scale at every step (Wang et al. 2025, arXiv 2510.22319)."""

    takes_older_samples: ClassVar[bool] = False
    exact_replay: ClassVar[bool] = True
    clip_range: PositiveFloat = 2e-6
    """Ratios are clipped to 1 plus and minus this."""
    kl_coef: NonNegative = 0.0

    def conflicts(self, sampling: Sampling | TextSampling) -> Iterator[str]:
        if isinstance(sampling, Sampling) and sampling.sde.kind == "cps":
            yield (
                "sampling.sde.kind: grpo_guard removes the bias of a Gaussian's log-prob, and the log-prob of cps "
                "leaves out the noise's size; set it to flow, dance or linear"
            )


class GRPOGuard(DenoisingObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``. ``new`` holds old_distance ``[B, T]`` too."""

    def __init__(self, settings: GRPOGuardSettings) -> None:
        super().__init__(settings, frozenset({"old_distance"}))
        self.clip_range = settings.clip_range

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
    ) -> StepLoss:
        divergence = new["old_distance"] / (2 * old["std"].square())
        normal = (log_ratio + divergence) * old["std"]
        clipped = clipped_surrogate(normal, advantages, self.clip_range, self.clip_range)
        outside = (clipped.ratio - 1).abs() > self.clip_range
        return StepLoss(clipped.loss / -old["dt"], clipped.ratio, outside, {"policy/old_kl": divergence})
