"""DiffusionNFT: online RL on the forward process (Zheng et al. 2025, arXiv 2509.16117, eq. 9).

No SDE, no log-probs: clean samples of the old policy are noised afresh, and the velocity is pulled toward
(away from) them by an implicit positive (negative) policy:

    v+ = beta v + (1 - beta) v_old,   v- = (1 + beta) v_old - beta v,   r = clip(A / A_max, -1, 1) / 2 + 1/2
    L  = A_max [ r |x0+ - x0|^2 / w+ + (1 - r) |x0- - x0|^2 / w- ] / beta + kl |v - v_ref|^2

with ``x0+- = x_s - s v+-`` and ``w+- = mean |x0+- - x0|`` (no gradient, at least 1e-5), as in the authors' code.

The objective improves on the policy that drew the samples, and ``v_old`` must be its velocity: their theorem takes it
apart into the velocities of the positive and the negative policy over those samples. So of samples drawn ahead
(``placement: disaggregated``) ``v_old`` is of the old policy as it was when it drew them, not of what it has become
since, and no importance weight is called for. This departs from the paper, where the old policy of the present draws:
the policy that trains is ``staleness`` steps further from the one it is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmrl.algorithms.advantages import Advantages, group_advantages
from mmrl.algorithms.objective import Kind, Loss, Scored
from mmrl.algorithms.sde import squared_distance
from mmrl.config.algorithms import DiffusionNFT, Spread


class Objective:
    """Final class; see ``mmrl.algorithms.objective.Objective``."""

    kind: Kind = "forward_process"
    last_steps = 0
    prepares: frozenset[str] = frozenset()
    samples_with = "old"

    def __init__(self, settings: DiffusionNFT) -> None:
        self.beta = settings.beta
        self.advantage_clip = settings.advantage_clip
        self.advantage_std: Spread = settings.advantage_std
        self.kl_coef = settings.kl_coef
        self.entries = settings.noise_levels
        self.copies = {"old": lambda n: min(settings.old_decay_rate * n, settings.old_decay_max)}
        self.needs = frozenset({"v", "v_old"} | ({"v_reference"} if settings.kl_coef else set()))

    def advantages(self, scored: Scored) -> Advantages:
        return group_advantages(scored.rewards, scored.groups, self.advantage_std, scored.all_sum)

    def amount(self, weights: Tensor, lengths: Tensor) -> float:
        """Every entry (denoising step, noise level) of every sample counts the same."""
        return float((weights.double() * lengths).sum())

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """``new``: v, v_old, v_reference, x_s and x0 ``[B, ...]``, sigma ``[B]``; ``old``: advantages and weights
        ``[B]``."""
        weights = old["weights"]
        loss, r = nft_loss(
            new["v"],
            new["v_old"],
            new["x_s"],
            new["x0"],
            new["sigma"],
            old["advantages"],
            self.beta,
            self.advantage_clip,
        )
        sums = {
            "policy/loss": loss,
            "policy/optimality": r,
            "policy/v_change": squared_distance(new["v"], new["v_old"]),
        }
        if "v_reference" in self.needs:
            kl = squared_distance(new["v"], new["v_reference"])
            loss = loss + self.kl_coef * kl
            sums["policy/kl"] = kl
        return Loss(
            value=(loss * weights).sum() / total,
            sums={name: (value.detach() * weights).sum() for name, value in sums.items()},
            maxima={},
        )


def nft_loss(
    v: Tensor, v_old: Tensor, x_s: Tensor, x0: Tensor, sigma: Tensor, advantages: Tensor, beta: float, clip: float
) -> tuple[Tensor, Tensor]:
    """The loss without its KL term and the optimality probability ``r``, each ``[B]``."""
    s = sigma.view(-1, *[1] * (x0.ndim - 1))
    r = (advantages.clamp(-clip, clip) / clip / 2 + 0.5).clamp(0, 1)
    positive = x_s - s * (beta * v + (1 - beta) * v_old)
    negative = x_s - s * ((1 + beta) * v_old - beta * v)
    with torch.no_grad():
        w_positive, w_negative = (
            (guess.double() - x0.double()).abs().flatten(1).mean(1).clamp(min=1e-5).float()
            for guess in (positive, negative)
        )
    pull = r * squared_distance(positive, x0) / w_positive
    push = (1 - r) * squared_distance(negative, x0) / w_negative
    return clip * (pull + push) / beta, r
