"""DRaFT-K: reward back-propagated through the last K sampling steps (Clark et al. 2023, arXiv 2309.17400, alg. 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor

from mmrl.algorithms.advantages import Advantages, group_advantages
from mmrl.algorithms.objective import Kind, Loss, Scored
from mmrl.config.algorithms import DRaFT


class Objective:
    """Final class; see ``mmrl.algorithms.objective.Objective``."""

    kind: Kind = "pathwise"
    needs = frozenset({"rewards"})
    prepares: frozenset[str] = frozenset()
    samples_with = "current"
    copies: ClassVar[dict[str, Callable[[int], float]]] = {}
    entries = None

    def __init__(self, settings: DRaFT) -> None:
        self.last_steps = settings.last_steps

    def advantages(self, scored: Scored) -> Advantages:
        return group_advantages(scored.rewards, scored.groups, "none")

    def amount(self, weights: Tensor, lengths: Tensor) -> float:
        """Every entry (denoising step, noise level) of every sample counts the same."""
        return float((weights.double() * lengths).sum())

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """``new``: rewards ``[B]`` with their graph. The loss is their negative mean."""
        rewards = new["rewards"]
        return Loss(value=-rewards.sum() / total, sums={"policy/loss": -rewards.detach().sum()}, maxima={})
