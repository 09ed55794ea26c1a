"""DGPO: a group's better samples against its worse ones, without log-probs (Luo et al. 2025, arXiv 2510.08425).

    L = K / beta log(1 + exp(S)) of each group,   S = beta / K sum over its K samples of A (l - l_ref)

with ``l = mean (v - (eps - x0))^2``. Its gradient is ``sigmoid(S)`` times that of ``sum A l``: the weight falls as the
policy comes to prefer samples with a positive advantage. All samples of a group get the same noise.

A moving average of the policy is kept, as in the authors' code. A sample with ``A > 0`` (else) has no gradient where
``exp(l_average - l)`` is above ``1 + clip_range`` (below ``1 - clip_range``); its error still counts in S. After
``average_samples_after`` steps the average draws the samples. It may also be the reference (TDM-R1, arXiv 2603.07700).

Departs: each group has its own noise levels; the authors draw them once for all prompts. The reference has the policy's
guidance; theirs is guided (kl_cfg 4.5). A sample without a reward counts in K.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import softplus

from mmrl.algorithms.advantages import Advantages, group_advantages
from mmrl.algorithms.forward_process import ForwardObjective, in_group
from mmrl.algorithms.objective import Scored
from mmrl.algorithms.sde import squared_distance
from mmrl.config.algorithm_settings import ForwardSettings, PictureSettings, Spread
from mmrl.config.section import Fraction, NonNegative


class DGPOSettings(ForwardSettings, PictureSettings):
    """Direct group preference optimisation (Luo et al. 2025, arXiv 2510.08425)."""

    whole: ClassVar[Literal["group", "pair"] | None] = "group"
    noise_levels: PositiveInt | None = 4
    """Noise levels trained per group; None takes every one above t_min."""
    t_min: Fraction = 0.3
    """Share of the rollout's steps, at its end, whose levels do not train: of 10 steps the first 7 train."""
    beta: PositiveFloat = 100.0
    """Of the preference model: how steep a group's weight is."""
    advantage_std: Spread = "group"
    kl_coef: NonNegative = 0.0
    """Weight of the squared distance to the reference's velocity."""
    clip_range: PositiveFloat | None = 1e-2
    """A sample whose error differs by more than this from the average policy's, in the direction of its advantage, has
    no gradient (0.001 to 0.01 with guidance in sampling, 1e-5 to 1e-4 without); None does not clip."""
    reference: Literal["start", "average"] = "start"
    """The policy whose errors are compared with: that at the start of the run, or the moving average (with beta 2000
    to 5000)."""
    average_samples_after: Annotated[int, Field(ge=0)] | None = 200
    """After so many steps the moving average draws the samples; None: the policy, always."""
    average_decay_rate: NonNegative = 0.001
    """Growth of d in ``average_decay_max`` per step."""
    average_decay_max: Fraction = 0.3
    """After step n the average becomes d * average + (1 - d) * policy, d = min(rate * n, max)."""

    def levels(self, steps: int) -> list[int]:
        return super().levels(steps)[: math.ceil(round(steps * (1 - self.t_min), 6))]


class DGPO(ForwardObjective):
    """Final class; see ``mmrl.algorithms.objective.ForwardProcess``."""

    shares_noise = True

    def __init__(self, settings: DGPOSettings) -> None:
        self.clip_range, self.samples_after = settings.clip_range, settings.average_samples_after
        self.reference = "v_reference" if settings.reference == "start" else "v_average"
        clips = set() if self.clip_range is None else {"v_average"}
        needs = frozenset({"v", "target", self.reference} | clips)
        super().__init__(settings.noise_levels, settings.kl_coef, needs)
        self.beta, self.advantage_clip = settings.beta, settings.advantage_clip
        self.advantage_std = settings.advantage_std
        if "v_average" in needs or self.samples_after is not None:
            self.copies = {"average": lambda n: min(settings.average_decay_rate * n, settings.average_decay_max)}

    def samples_with(self, step: int) -> str:
        return "current" if self.samples_after is None or step <= self.samples_after else "average"

    def advantages(self, scored: Scored) -> Advantages:
        """All rows are kept, so that groups stay complete: a dropped sample has advantage 0."""
        plain = group_advantages(scored.rewards, scored.groups, self.advantage_std, scored.all_sum)
        return Advantages(plain.values, torch.ones_like(plain.valid), plain.groups, plain.zero_std_groups)

    def losses(
        self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Each of a group's ``K`` rows has 1 / K of the group's loss."""
        advantages = old["advantages"].clamp(-self.advantage_clip, self.advantage_clip)
        error = squared_distance(new["v"], new["target"])
        logged = {"policy/matching": error}
        if self.clip_range is not None:
            ratio = (squared_distance(new["v_average"], new["target"]) - error.detach()).exp()
            past = torch.where(advantages > 0, ratio > 1 + self.clip_range, ratio < 1 - self.clip_range)
            error = torch.where(past, error.detach(), error)
            logged["policy/clip_fraction"] = past.float()
        gain = error - squared_distance(new[self.reference], new["target"])
        size = in_group(torch.ones_like(gain), old["groups"])
        s = self.beta / size * in_group(advantages * gain, old["groups"])
        return softplus(s) / self.beta, {"policy/group_weight": s.sigmoid(), **logged}, {}
