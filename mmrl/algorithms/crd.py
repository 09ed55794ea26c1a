"""CRD: the policy's implicit rewards follow the rewards, both centred in a group (Zhu et al. 2026, arXiv 2603.14128).

    R = l_old - l,   l = mean (v - (eps - x0))^2 / sg(mean |v - (eps - x0)|),   a = clip(A / A_max, -1, 1) / 2 + 1/2
    L = A_max / beta (beta (R - mean R) - (a - mean a))^2 + kl_coef (m + a (1 - m)) mean (v - v_ref)^2

The means are over a group, without a gradient: a prompt's unknown constant cancels. ``v_ref`` is the policy at the
start, guided by ``reference_guidance``, so that a policy that samples without guidance is held near guided pictures.
The pull is weaker on worse samples (``adaptive_kl``): ``m = 1e-4 / kl_coef``, else 1. Two moving averages of the policy
are kept: ``old`` is compared with, and the slower one draws the samples, so that ``R`` does not vanish.

Departs: the authors' code (Flow-Factory's ``crd``) centres over the micro-batches of all devices, whatever their
prompts; here, as in the paper, over a prompt's group. Averages move once in a training step, theirs by the number of
optimizer steps (2 in theirs). The code's other losses (a cross-entropy, softmax centring) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat
from torch import Tensor

from mmrl.algorithms.forward_process import ForwardObjective, in_group
from mmrl.algorithms.sde import squared_distance
from mmrl.config.algorithm_settings import ForwardSettings, PictureSettings
from mmrl.config.section import Fraction, NonNegative

_LEAST_KL = 1e-4
"""The weight of the distance to the reference of the worst samples, with ``adaptive_kl``."""


class CRDSettings(ForwardSettings, PictureSettings):
    """Centred reward distillation (Zhu et al. 2026, arXiv 2603.14128)."""

    whole: ClassVar[Literal["group", "pair"] | None] = "group"
    beta: PositiveFloat = 1.0
    """Factor of the implicit rewards: a smaller one moves the policy further for the same rewards."""
    adaptive_weight: bool = True
    """Divide each squared distance by the mean distance (without a gradient), so that all noise levels count alike."""
    kl_coef: NonNegative = 0.1
    """Weight of the squared distance to the reference's velocity."""
    adaptive_kl: bool = True
    """Weigh that distance by the sample's advantage: the worst ones by 1e-4, the best ones by kl_coef."""
    reference_guidance: NonNegative | Literal["loss"] = 4.5
    """Guidance scale of the reference's predictions; ``loss`` takes that of the policy's (``algorithm.guidance``)."""
    old_decay_start: Fraction = 0.25
    """d of ``old_decay_max`` at the start."""
    old_decay_rate: NonNegative = 0.005
    """Growth of d in ``old_decay_max`` per step."""
    old_decay_max: Fraction = 0.999
    """After step n the old policy becomes d * old + (1 - d) * policy, d = min(start + rate * n, max)."""
    sampling_decay_after: Annotated[int, Field(ge=0)] = 75
    """Until this step the policy draws the samples; then a moving average of it."""
    sampling_decay_rate: NonNegative = 0.0075
    """Growth of d in ``sampling_decay_max`` per step."""
    sampling_decay_max: Fraction = 0.999
    """After step n that average becomes d * average + (1 - d) * policy, d = min(rate * (n - after), max)."""

    def levels(self, steps: int) -> list[int]:
        return list(range(steps))

    def guidance_of_reference(self, sampling: float) -> float:
        own = self.reference_guidance if self.kl_coef else "loss"
        return super().guidance_of_reference(sampling) if own == "loss" else own


class CRD(ForwardObjective):
    """Final class; see ``mmrl.algorithms.objective.ForwardProcess``."""

    def __init__(self, settings: CRDSettings) -> None:
        reference = {"v_reference"} if settings.kl_coef else set[str]()
        super().__init__(settings.noise_levels, 0.0, frozenset({"v", "v_old", "target"} | reference))
        self.advantage_clip, self.advantage_std = settings.advantage_clip, settings.advantage_std
        self.beta, self.adaptive_weight = settings.beta, settings.adaptive_weight
        self.pull = settings.kl_coef
        self.least = min(1.0, _LEAST_KL / settings.kl_coef) if settings.adaptive_kl and settings.kl_coef else 1.0
        s = settings
        self.copies = {
            "old": lambda n: min(s.old_decay_start + s.old_decay_rate * n, s.old_decay_max),
            "sampling": lambda n: min(max(0, n - s.sampling_decay_after) * s.sampling_decay_rate, s.sampling_decay_max),
        }

    def samples_with(self, step: int) -> str:
        return "sampling"

    def losses(
        self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """``A_max / beta`` times the squared difference of each row; a row of weight 0 is in no mean."""
        a = (old["advantages"] / self.advantage_clip).clamp(-1, 1) / 2 + 0.5
        error, error_old = (self.error(new[name], new["target"]) for name in ("v", "v_old"))
        implicit = error_old - error
        counted = (old["weights"] > 0).to(implicit.dtype)
        size = in_group(counted, old["groups"]).clamp(min=1)
        mean_implicit, mean_a = (in_group(one.detach() * counted, old["groups"]) / size for one in (implicit, a))
        gap = self.beta * (implicit - mean_implicit) - (a - mean_a)
        loss = self.advantage_clip / self.beta * gap.square()
        logged = {
            "policy/loss": loss,
            "policy/matching": squared_distance(new["v"], new["target"]),
            "policy/implicit_reward": implicit,
            "policy/v_change": squared_distance(new["v"], new["v_old"]),
        }
        if self.pull:
            logged["policy/kl"] = squared_distance(new["v"], new["v_reference"])
            loss = loss + self.pull * (self.least + a * (1 - self.least)) * logged["policy/kl"]
        return loss, logged, {}

    def error(self, v: Tensor, target: Tensor) -> Tensor:
        """``l`` ``[B]`` of velocities ``[B, ...]``."""
        distance = squared_distance(v, target)
        if not self.adaptive_weight:
            return distance
        size = (v.detach().double() - target.double()).abs().flatten(1).mean(1)
        return distance / size.clamp(min=1e-5).to(distance.dtype)
