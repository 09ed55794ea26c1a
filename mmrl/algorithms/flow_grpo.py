"""Flow-GRPO: the clipped policy gradient over denoising steps (Liu et al. 2025, arXiv 2505.05470, eq. 5).

Ratios are of mean (not summed) log-probs, hence clip ranges of 1e-4 and below. The KL term is the paper's code's:
the squared distance of the means over ``2 d^2``, ``d = std / sqrt(-dt)``, that is the true KL times ``-dt``, so that
published coefficients carry over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor

from mmrl.algorithms.advantages import Advantages, group_advantages
from mmrl.algorithms.objective import Kind, Loss, Scored
from mmrl.algorithms.policy_gradient import clipped_surrogate
from mmrl.config.algorithms import FlowGRPO, Spread


class Objective:
    """Final class; see ``mmrl.algorithms.objective.Objective``."""

    kind: Kind = "policy_gradient"
    last_steps = 0
    prepares: frozenset[str] = frozenset()
    samples_with = "current"
    copies: ClassVar[dict[str, Callable[[int], float]]] = {}
    entries = None

    def __init__(self, settings: FlowGRPO) -> None:
        self.clip_range = settings.clip_range
        self.advantage_clip = settings.advantage_clip
        self.advantage_std: Spread = settings.advantage_std
        self.kl_coef = settings.kl_coef
        self.needs = frozenset({"log_probs"} | ({"reference_distance"} if settings.kl_coef else set()))

    def advantages(self, scored: Scored) -> Advantages:
        return group_advantages(scored.rewards, scored.groups, self.advantage_std, scored.all_sum)

    def amount(self, weights: Tensor, lengths: Tensor) -> float:
        """Every entry (denoising step, noise level) of every sample counts the same."""
        return float((weights.double() * lengths).sum())

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """``new``: log_probs ``[B, T]``, optionally reference_distance ``[B, T]``; ``old``: log_probs ``[B, T]``,
        advantages ``[B]``, weights ``[B]`` (0 leaves a sample out), std ``[T]``, dt ``[T]``, optionally importance
        ``[B, T]`` (of samples that another policy drew: ``mmrl.algorithms.mismatch``)."""
        weights = old["weights"].unsqueeze(1)
        advantages = old["advantages"].clamp(-self.advantage_clip, self.advantage_clip).unsqueeze(1)
        log_ratio = new["log_probs"] - old["log_probs"]
        clipped = clipped_surrogate(log_ratio, advantages, self.clip_range, self.clip_range)
        loss, ratio = clipped.loss * old.get("importance", 1.0), clipped.ratio
        sums = {
            "policy/ratio": ratio,
            "policy/clip_fraction": ((ratio - 1).abs() > self.clip_range).float(),
            "policy/approx_kl": 0.5 * log_ratio.square(),
            "policy/loss": loss,
        }
        if "reference_distance" in self.needs:
            kl = new["reference_distance"] * (-old["dt"]) / (2 * old["std"].square())
            loss = loss + self.kl_coef * kl
            sums["policy/kl"] = kl
        return Loss(
            value=(loss * weights).sum() / total,
            sums={name: (value.detach() * weights).sum() for name, value in sums.items()},
            maxima={"policy/ratio_max_dev": ((ratio.detach() - 1).abs() * weights).max()},
        )
