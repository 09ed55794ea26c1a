"""DGPO: a group's better samples against its worse ones, without log-probs (Luo et al. 2025, arXiv 2510.08425).

    L = K / beta log(1 + exp(S)) of each group,   S = beta / K sum over its K samples of A (l - l_ref)

with ``l = mean (v - (eps - x0))^2``. Its gradient is ``sigmoid(S)`` times that of ``sum A l``: the weight falls as the
policy comes to prefer what has an advantage. All of a group are noised alike.

Departs: the reference is the policy as the run began, throughout; the authors' code goes over to a moving average after
200 steps, and clips matching errors by it. A sample without a reward counts in K.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mmrl.algorithms.advantages import Advantages, group_advantages
from mmrl.algorithms.forward_process import ForwardObjective, in_group
from mmrl.algorithms.objective import Scored
from mmrl.algorithms.sde import squared_distance
from mmrl.config.picture_algorithms import DGPO


class Objective(ForwardObjective):
    """Final class; see ``mmrl.algorithms.objective.Objective``."""

    shares_noise = True

    def __init__(self, settings: DGPO) -> None:
        super().__init__(settings.noise_levels, settings.kl_coef, frozenset({"v", "v_reference", "target"}))
        self.beta, self.advantage_clip = settings.beta, settings.advantage_clip
        self.advantage_std = settings.advantage_std

    def advantages(self, scored: Scored) -> Advantages:
        """All rows stay, so that groups stay whole: a dropped one has advantage 0."""
        plain = group_advantages(scored.rewards, scored.groups, self.advantage_std, scored.all_sum)
        return Advantages(plain.values, torch.ones_like(plain.valid), plain.groups, plain.zero_std_groups)

    def losses(
        self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """A ``K``-th of a group's loss on each of its rows."""
        advantages = old["advantages"].clamp(-self.advantage_clip, self.advantage_clip)
        error = squared_distance(new["v"], new["target"])
        gain = error - squared_distance(new["v_reference"], new["target"])
        size = in_group(torch.ones_like(gain), old["groups"])
        s = self.beta / size * in_group(advantages * gain, old["groups"])
        return softplus(s) / self.beta, {"policy/group_weight": s.sigmoid(), "policy/matching": error}, {}
