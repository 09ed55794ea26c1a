"""DRaFT-K: reward back-propagated through the last K sampling steps (Clark et al. 2023, arXiv 2309.17400, alg. 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from torch import Tensor

from mmrl.algorithms.objective import Kind, Loss
from mmrl.config.schema import DRaFT


class Objective:
    """Final class; see ``mmrl.algorithms.objective.Objective``."""

    kind: Kind = "pathwise"
    needs = frozenset({"rewards"})
    advantage_std: Literal["none"] = "none"
    samples_with = "current"
    copies: ClassVar[dict[str, Callable[[int], float]]] = {}
    entries = None

    def __init__(self, settings: DRaFT) -> None:
        self.last_steps = settings.last_steps

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """``new``: rewards ``[B]`` with their graph. The loss is their negative mean."""
        rewards = new["rewards"]
        return Loss(value=-rewards.sum() / total, sums={"policy/loss": -rewards.detach().sum()}, maxima={})
