"""Diffusion-DPO online: the best sample of a group against its worst (Wallace et al. 2023, arXiv 2311.12908, eq. 14).

    L = -log sigmoid(-beta / 2 [(l_w - l_w,ref) - (l_l - l_l,ref)]),   l = mean (v - (eps - x0))^2

Both samples of a pair get the same noise. A group whose rewards are all equal has no pair.

Departs: pairs come from the run's own samples of each step, not from a data set (``picture_dpo`` takes those). The
matching error is that of the velocity, which flow models predict, and beta multiplies a mean over dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import logsigmoid

from mmrl.algorithms.advantages import Advantages, group_advantages, uneven
from mmrl.algorithms.forward_process import ForwardObjective, in_group
from mmrl.algorithms.objective import Scored
from mmrl.algorithms.sde import squared_distance
from mmrl.config.algorithm_settings import ForwardSettings


class DiffusionDPOSettings(ForwardSettings):
    """Diffusion-DPO on the best and the worst sample of each group (Wallace et al. 2023, arXiv 2311.12908)."""

    whole: ClassVar[Literal["group", "pair"] | None] = "pair"
    beta: PositiveFloat = 2000.0
    """How strongly the reference holds the policy; larger stays nearer."""


class DiffusionDPO(ForwardObjective):
    """Final class; see ``mmrl.algorithms.objective.ForwardProcess``. Advantages: 1 for the better, -1 for the worse."""

    shares_noise = True

    def __init__(self, settings: DiffusionDPOSettings) -> None:
        super().__init__(settings.noise_levels, 0.0, frozenset({"v", "v_reference", "target"}))
        self.beta = settings.beta

    def advantages(self, scored: Scored) -> Advantages:
        plain = group_advantages(scored.rewards, scored.groups, "none")
        values = torch.zeros_like(plain.values)
        for rows, inside in uneven(plain, scored.groups):
            values[rows[inside.argmax()]], values[rows[inside.argmin()]] = 1.0, -1.0
        return Advantages(values, values != 0, plain.groups, plain.zero_std_groups)

    def loss_denominator(self, weights: Tensor, lengths: Tensor) -> float:
        """Every noise level of every pair counts the same."""
        return super().loss_denominator(weights, lengths) / 2

    def losses(
        self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Each of a pair's two rows has half of the pair's loss."""
        error = squared_distance(new["v"], new["target"])
        gain = error - squared_distance(new["v_reference"], new["target"])
        inside = -self.beta / 2 * in_group(gain * old["advantages"] * old["weights"], old["groups"])
        half = {"policy/pair_accuracy": (inside > 0).float(), "policy/pair_margin": inside, "policy/matching": error}
        return -logsigmoid(inside) / 2, {name: value / 2 for name, value in half.items()}, {}
