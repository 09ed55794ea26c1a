"""ReFL: the reward of the picture that one random late step predicts (Xu et al. 2023, arXiv 2304.05977, alg. 1).

    L = scale max(threshold - r(x0^), 0) + kl_coef |v - v_ref|^2,   x0^ = x_s - s v(x_s), a graph through this one step

Departs: the step is drawn once for all samples of a training step; kl_coef (0) is not in the paper. The paper's
pretraining loss on given pictures is left out, as in its code.
"""

from __future__ import annotations

from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.objective import GraphSteps
from mmrl.algorithms.pathwise import PathwiseObjective
from mmrl.config.algorithm_settings import PathwiseSettings
from mmrl.config.section import Decay


class ReFLSettings(PathwiseSettings):
    """Reward of the picture predicted at one random late step (Xu et al. 2023, arXiv 2304.05977)."""

    late: Decay = 0.75
    """Share of the steps after which the step is drawn (30 of 40 in the paper)."""
    threshold: float = 2.0
    """A reward beyond it has no gradient."""
    scale: PositiveFloat = 1e-3
    """Factor of the loss."""


class ReFL(PathwiseObjective):
    """Final class; see ``mmrl.algorithms.objective.Pathwise``."""

    def __init__(self, settings: ReFLSettings) -> None:
        super().__init__(settings.kl_coef)
        self.late, self.threshold, self.scale = settings.late, settings.threshold, settings.scale

    def graph_steps(self, steps: int, draw: float) -> GraphSteps:
        first = int(self.late * steps)
        step = first + int(draw * (steps - first))
        return GraphSteps(step, step)

    def of_reward(self, rewards: Tensor) -> Tensor:
        return self.scale * (self.threshold - rewards).relu()
