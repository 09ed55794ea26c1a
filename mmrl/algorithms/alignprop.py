"""AlignProp: reward back-propagated through a random number of last steps (Prabhudesai et al. 2023, arXiv 2310.03739).

    L = -scale r(x0), or scale |target - r(x0)|, + kl_coef |v - v_ref|^2,   a graph through the last K steps

The authors detach the predictions before the last K steps and keep the graph through the latents. No weight is part of
that graph, so those steps are sampled without one here, which gives the same gradient.

Departs: K is uniform, from 1 to all, and drawn once for all samples of a training step; the authors' code draws it for
every batch. kl_coef (0) is not the paper's.
"""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from mmrl.algorithms.objective import GraphSteps
from mmrl.algorithms.pathwise import PathwiseObjective
from mmrl.config.algorithm_settings import PathwiseSettings


class AlignPropSettings(PathwiseSettings):
    """Back-propagation through a random number of last steps (Prabhudesai et al. 2023, arXiv 2310.03739)."""

    last_steps: PositiveInt | None = None
    """None draws the number anew in every training step, from 1 to all with equal chances."""
    target: float | None = None
    """The loss is the reward's distance to it (10 for the aesthetic score); None follows the reward itself."""
    scale: PositiveFloat = 1.0
    """Factor of the loss."""


class AlignProp(PathwiseObjective):
    """Final class; see ``mmrl.algorithms.objective.Pathwise``."""

    def __init__(self, settings: AlignPropSettings) -> None:
        super().__init__(settings.kl_coef)
        self.last_steps, self.target, self.scale = settings.last_steps, settings.target, settings.scale

    def graph_steps(self, steps: int, draw: float) -> GraphSteps:
        last = steps - int(draw * steps) if self.last_steps is None else self.last_steps
        return GraphSteps(steps - last, steps - 1)

    def of_reward(self, rewards: Tensor) -> Tensor:
        return -self.scale * rewards if self.target is None else self.scale * (self.target - rewards).abs()
