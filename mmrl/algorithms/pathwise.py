"""Shared code of the pathwise objectives: the loss is a function of differentiable rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from mmrl.algorithms.objective import GraphSteps, Loss


class PathwiseObjective(ABC):
    """Abstract; see ``mmrl.algorithms.objective.Pathwise``. A subclass defines ``graph_steps`` and ``of_reward``."""

    kind: Literal["pathwise"] = "pathwise"
    entries: int | None = None

    def __init__(self, kl_coef: float) -> None:
        self.kl_coef = kl_coef
        self.needs = frozenset({"rewards"} | ({"reference_distance"} if kl_coef else set()))

    @abstractmethod
    def graph_steps(self, steps: int, draw: float) -> GraphSteps: ...

    @abstractmethod
    def of_reward(self, rewards: Tensor) -> Tensor:
        """The loss of rewards with their graph, of any shape."""

    def of_pictures(self, new: Mapping[str, Tensor]) -> Tensor:
        """The loss ``[B]`` of generated pictures; ``new`` as in ``loss``."""
        return self.of_reward(new["rewards"]).mean(0)

    def phrases(self, step: int) -> Sequence[str]:
        return ()

    def loss_denominator(self, weights: Tensor, lengths: Tensor) -> float:
        """Every sample counts the same."""
        return float((weights.double() * lengths).sum())

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """``new``: rewards ``[P, B]`` with their graph, of ``P`` predictions of each picture, over which the loss is
        averaged, and reference_distance ``[B]``, where ``kl_coef`` is not 0."""
        value = self.of_pictures(new)
        sums = {"policy/loss": value.detach().sum()}
        if self.kl_coef:
            sums["policy/kl"] = new["reference_distance"].detach().sum()
            value = value + self.kl_coef * new["reference_distance"]
        return Loss(value=value.sum() / total, sums=sums, maxima={})
