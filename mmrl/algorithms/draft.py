"""DRaFT-K: reward back-propagated through the last K sampling steps (Clark et al. 2023, arXiv 2309.17400, alg. 1).

    L = -r(x0) + kl_coef |v - v_ref|^2,   the last last_steps steps with a graph, the earlier ones without
    DRaFT-LV: L = -mean of r over x0 and its renoise predictions from (1 - s) x0 + s eps, s the last step's level

Departs: kl_coef (0) is not the paper's. DRaFT-LV averages over the sampled picture as well: 1 + renoise gradients.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt
from torch import Tensor

from mmrl.algorithms.objective import GraphSteps
from mmrl.algorithms.pathwise import PathwiseObjective
from mmrl.config.algorithm_settings import PathwiseSettings


class DRaFTSettings(PathwiseSettings):
    """Reward back-propagation through the last K steps (Clark et al. 2023, arXiv 2309.17400)."""

    last_steps: PositiveInt = 1
    """Denoising steps at the end that the reward's gradient goes through; the earlier ones have none."""
    renoise: Annotated[int, Field(ge=0)] = 0
    """DRaFT-LV: noise the picture to the last step's level this many times (2 in the paper), predict it anew each
    time, and average the gradients; needs last_steps 1."""


class DRaFT(PathwiseObjective):
    """Final class; see ``mmrl.algorithms.objective.Pathwise``."""

    def __init__(self, settings: DRaFTSettings) -> None:
        super().__init__(settings.kl_coef)
        self.last_steps, self.renoise = settings.last_steps, settings.renoise

    def graph_steps(self, steps: int, draw: float) -> GraphSteps:
        return GraphSteps(steps - self.last_steps, steps - 1, self.renoise)

    def of_reward(self, rewards: Tensor) -> Tensor:
        return -rewards
