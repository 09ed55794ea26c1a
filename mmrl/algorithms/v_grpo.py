"""V-GRPO: a policy gradient whose log-prob is the flow loss of the sample (Tang et al. 2026, arXiv 2604.23380).

    l = mean (x0_v - x0)^2 / sg(mean |x0_v - x0|),   x0_v = x_s - s v,   r = exp(l_old - l) on the same eps and s
    L = max(-A' r, -A' clip(r, 1 - clip_range, 1 + clip_range)) + old_kl_coef mean (x0_v - x0_v_old)^2
    A' = soft_clip tanh(A / soft_clip)

``sg`` stops the gradient (the adaptive weight). All samples of a group get the same pairs of noise and level, and the
levels are stratified: one is drawn from each of ``noise_levels`` equal parts of the rollout's levels. With one update a
step the old policy is the policy itself: the ratio is exactly 1, and no copy of the weights is kept.

Departs: each level has a ratio of its own, which is clipped alone; the authors clip the ratio of the mean over the
levels. Where the ratio is 1 both have the same gradient. Noise is drawn for each group; the authors draw it once for
a whole batch. The weight's denominator is at least 1e-5. ``kl_coef`` and ``advantage_clip`` are not in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from mmrl.algorithms.forward_process import ForwardObjective
from mmrl.algorithms.policy_gradient import clipped_surrogate
from mmrl.algorithms.sde import squared_distance
from mmrl.config.algorithm_settings import ForwardSettings, PictureSettings, Spread
from mmrl.config.section import NonNegative


class VGRPOSettings(ForwardSettings, PictureSettings):
    """A policy gradient on the flow loss, with little variance (Tang et al. 2026, arXiv 2604.23380)."""

    stratified: ClassVar[bool] = True
    noise_levels: PositiveInt | None = 4
    """Noise levels trained per group, one of each of so many equal parts of the rollout's levels; None takes all levels
    but one."""
    advantage_std: Spread = "group"
    soft_clip: PositiveFloat | None = 3.0
    """The advantage A becomes soft_clip tanh(A / soft_clip), for one update a step; None leaves it (the authors: with
    several updates, and with rewards of few values)."""
    clip_range: PositiveFloat | None = 1e-2
    """The ratio to the old policy is clipped to 1 plus and minus this (the authors: 0.006 to 0.03); None does not clip.
    With one update a step the ratio is 1."""
    old_kl_coef: NonNegative = 0.0
    """Weight of the squared distance to the clean result that the old policy predicts (the authors: 0.3, to keep what
    was learned from another reward). It needs several updates a step."""
    kl_coef: NonNegative = 0.0
    """Weight of the squared distance to the reference's velocity."""

    def levels(self, steps: int) -> list[int]:
        return list(range(steps))

    def unread(self, updates: int) -> Iterator[str]:
        if updates == 1 and self.old_kl_coef:
            yield (
                "algorithm.old_kl_coef: with one update a step the old policy is the policy itself, so that their "
                "distance is 0; set train.updates_per_step to 2 or more, or remove it"
            )


class VGRPO(ForwardObjective):
    """Final class; see ``mmrl.algorithms.objective.ForwardProcess``."""

    shares_noise = True

    def __init__(self, settings: VGRPOSettings) -> None:
        super().__init__(settings.noise_levels, settings.kl_coef, frozenset({"v", "v_old", "target"}))
        self.clip_range, self.soft_clip = settings.clip_range, settings.soft_clip
        self.old_kl_coef = settings.old_kl_coef
        self.advantage_clip, self.advantage_std = settings.advantage_clip, settings.advantage_std
        self.copies = {"old": lambda _: 0.0}

    def in_one_update(self) -> None:
        self.copies, self.needs = {}, self.needs - {"v_old"}

    def losses(
        self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        v_old = new["v_old"] if "v_old" in self.needs else new["v"].detach()
        loss, loss_old = (adaptive_loss(v, new["target"], new["sigma"]) for v in (new["v"], v_old))
        advantages = old["advantages"].clamp(-self.advantage_clip, self.advantage_clip)
        if self.soft_clip is not None:
            advantages = self.soft_clip * (advantages / self.soft_clip).tanh()
        limit = float("inf") if self.clip_range is None else self.clip_range
        clipped = clipped_surrogate(loss_old - loss, advantages, limit, limit)
        deviation = (clipped.ratio - 1).abs()
        moved = new["sigma"].square() * squared_distance(new["v"], v_old)
        logged = {
            "policy/ratio": clipped.ratio,
            "policy/clip_fraction": (deviation > limit).float(),
            "policy/matching": squared_distance(new["v"], new["target"]),
            "policy/x0_change": moved,
        }
        return clipped.loss + self.old_kl_coef * moved, logged, {"policy/ratio_max_dev": deviation}


def adaptive_loss(v: Tensor, target: Tensor, sigma: Tensor) -> Tensor:
    """The flow loss ``l`` ``[B]`` float64 of velocities ``[B, ...]`` at noise levels ``sigma`` ``[B]``.

    ``x0_v - x0`` is ``s (target - v)``, so that ``l`` is ``s`` times the same quotient of velocities.
    """
    s = sigma.double()
    size = s * (v.detach().float() - target.float()).abs().flatten(1).mean(1).double()
    return s.square() * squared_distance(v, target).double() / size.clamp(min=1e-5)
