"""Shared code of the policy gradients over denoising steps: advantages, KL to the reference, and metrics.

    L = mean over samples and steps of [ surrogate + kl_coef |mu - mu_ref|^2 / (2 e^2) ]

Ratios are of mean (not summed) log-probs, so clip ranges are 1e-4 and below. ``e`` (``sde.Coefficients.kl_std``)
follows the code of each noise's authors, so that published coefficients carry over: the step's ``std``, which makes the
term the KL of the two Gaussians; with Flow-SDE ``std / sqrt(-dt)``. (FlowCPS's scripts for SD3 and FLUX do not divide;
its other scripts and Flow-GRPO's CPS do.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mmrl.algorithms.objective import EqualEntries, Loss
from mmrl.config.algorithm_settings import StepSettings


@dataclass(frozen=True)
class StepLoss:
    """The policy's part of the loss and its ratio, ``[B, T]``.

    ``outside`` (bool) marks ratios beyond the clip range, or entries left out; ``logged``: metric name to ``[B, T]``.
    """

    loss: Tensor
    ratio: Tensor
    outside: Tensor
    logged: Mapping[str, Tensor]


class DenoisingObjective(EqualEntries, ABC):
    """Abstract; see ``mmrl.algorithms.objective.PolicyGradient``. A subclass defines ``surrogate``."""

    kind: Literal["policy_gradient"] = "policy_gradient"
    prepares: frozenset[str] = frozenset()

    def __init__(self, settings: StepSettings, needs: frozenset[str] = frozenset()) -> None:
        """``needs``: what the surrogate reads from ``new`` besides log_probs."""
        self.advantage_clip = settings.advantage_clip
        self.advantage_std = settings.advantage_std
        self.kl_coef = settings.kl_coef
        self.entries = settings.trained_steps
        self.needs = needs | {"log_probs"} | ({"reference_distance"} if settings.kl_coef else set())

    @abstractmethod
    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
    ) -> StepLoss:
        """``log_ratio`` ``[B, T]`` with its graph, ``advantages`` ``[B, 1]`` or ``[B, T]``; ``new`` and ``old`` as in
        ``loss``."""

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """``new``: log_probs ``[B, T]``, and reference_distance and old_distance ``[B, T]`` if ``needs`` has them;
        teacher_kl and teacher_loss ``[B, T]`` where the recipe has teachers.

        ``old``: log_probs ``[B, T]``, advantages ``[B]`` or ``[B, T]``, weights ``[B]`` (0 leaves a sample out), std,
        kl_std, dt and c_v ``[T]``, every_std and every_c_v ``[S]`` of all steps that may be trained, optionally
        importance ``[B, T]`` (for samples that a different policy drew: ``mmrl.algorithms.mismatch``).
        """
        weights = old["weights"].unsqueeze(1)
        advantages = old["advantages"].clamp(-self.advantage_clip, self.advantage_clip)
        advantages = advantages if advantages.ndim == 2 else advantages.unsqueeze(1)
        log_ratio = new["log_probs"] - old["log_probs"]
        step = self.surrogate(log_ratio, advantages, new, old)
        loss = step.loss * old.get("importance", 1.0)
        sums = {
            "policy/ratio": step.ratio,
            "policy/clip_fraction": step.outside.float(),
            "policy/approx_kl": 0.5 * log_ratio.square(),
            "policy/loss": loss,
            **step.logged,
        }
        if "reference_distance" in self.needs:
            kl = new["reference_distance"] / (2 * old["kl_std"].square())
            loss = loss + self.kl_coef * kl
            sums["policy/kl"] = kl
        if "teacher_kl" in new:
            loss = loss + new["teacher_loss"]
            sums |= {"teacher/kl": new["teacher_kl"], "teacher/loss": new["teacher_loss"]}
        return Loss(
            value=(loss * weights).sum() / total,
            sums={name: (value.detach() * weights).sum() for name, value in sums.items()},
            maxima={"policy/ratio_max_dev": ((step.ratio.detach() - 1).abs() * weights).max()},
        )
