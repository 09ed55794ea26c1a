"""SRPO: the reward of a picture recovered from one prediction by its known noise (Shen et al. 2025, arXiv 2509.06942).

    x_a = (1 - a) x0 + a eps,   x_b = x_a + (b - a) v(x_a),   x0~ = (x_b - b eps) / (1 - b)
    L = max(threshold - (1 + k) r+(x0~) + r-(x0~), 0) / 2 of a = b + d, plus the same of a = b - d with r+, r- exchanged

``x0`` is sampled without a graph, ``eps`` is the noise it was sampled from, ``v`` has a graph. Because the noise is
known, a whole picture is recovered even from almost pure noise, so early steps train too. ``r+`` and ``r-`` are the
reward with a wanted and an unwanted word before the prompt; what does not depend on the words has the weight ``k``.
Without words (``wanted: []``, ``unwanted: []``): L = max(threshold - r(x0~), 0), a = b + d (Direct-Align alone).

Departs: x0 comes from the ODE, the authors' from an SDE. ``b`` is drawn once for all samples of a step, and so that
``a`` stays among the levels. Each text is scored separately: for rewards linear in the text's embedding (CLIP) this
equals the authors' one score of (1 + k) text+ - text-. kl_coef (0) is not in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from mmrl.algorithms.objective import GraphSteps
from mmrl.algorithms.pathwise import PathwiseObjective
from mmrl.config.algorithm_settings import PathwiseSettings
from mmrl.config.sampling import Sampling, TextSampling


class SRPOSettings(PathwiseSettings):
    """Rewards of pictures recovered by known noise, relative to words (Shen et al. 2025, arXiv 2509.06942)."""

    wanted: tuple[str, ...] = ("Natural-lighting", "Detail", "Detailed", "Real")
    """Words put before the prompt, one per training step in turn, which the reward should favour; [] takes the reward
    itself."""
    unwanted: tuple[str, ...] = ("Concept art", "Painting", "Anime", "Flat", "Oil")
    """As ``wanted``: words whose reward is subtracted."""
    lowest: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Lowest noise level that trains: that of the 25th of the authors' 50 steps with shift 3."""
    highest: Annotated[float, Field(gt=0, lt=1)] = 0.964
    """Highest noise level that trains: that of the 5th of these steps."""
    jump: Annotated[float, Field(gt=0, le=0.5)] = 0.1
    """How far one prediction goes, as a share of these levels."""
    discount: tuple[float, float] = (0.1, 0.25)
    """Weight ``k`` of the reward itself, besides the difference of the words, at the lowest and at the highest level;
    for predictions toward the picture."""
    discount_inverted: tuple[float, float] = (0.3, 0.01)
    """The same for predictions away from it."""
    threshold: float = 0.7
    """A relative reward beyond it has no gradient."""

    def conflicts(self, sampling: Sampling | TextSampling) -> Iterator[str]:
        if self.lowest >= self.highest:
            yield f"algorithm.lowest: {self.lowest:g} is not below highest, {self.highest:g}; lower it"
        if bool(self.wanted) != bool(self.unwanted):
            yield "algorithm.wanted: wanted and unwanted words are compared; give both, or set both to []"
        if sampling.type == "diffusion" and sampling.strength is not None:
            yield (
                f"algorithm.type: {self.type} trains noise levels of its own, and sampling.strength leaves some out; "
                "set algorithm.type to draft"
            )


class SRPO(PathwiseObjective):
    """Final class; see ``mmrl.algorithms.objective.Pathwise``."""

    def __init__(self, settings: SRPOSettings) -> None:
        super().__init__(settings.kl_coef)
        self.settings = settings

    def graph_steps(self, steps: int, draw: float) -> GraphSteps:
        low, range_ = self.settings.lowest, self.settings.highest - self.settings.lowest
        d = self.settings.jump * range_
        b = low + d + draw * (range_ - 2 * d)
        return GraphSteps(steps, steps - 1, jumps=((b + d, b), (b - d, b)) if self.settings.wanted else ((b + d, b),))

    def phrases(self, step: int) -> list[str]:
        return [f"{words[step % len(words)]}. " for words in (self.settings.wanted, self.settings.unwanted) if words]

    def of_reward(self, rewards: Tensor) -> Tensor:
        return (self.settings.threshold - rewards).relu()

    def of_pictures(self, new: Mapping[str, Tensor]) -> Tensor:
        """``new``: rewards ``[W P, B]``, for each of the ``W`` phrases those of all ``P`` jumps, and from ``[P]``, the
        levels at which the jumps start."""
        rewards = new["rewards"]
        if not self.settings.wanted:
            return self.of_reward(rewards).mean(0)
        wanted, unwanted = rewards.view(2, 2, -1)
        (a, below), of = new["from"].tolist(), self.settings
        range_ = of.highest - of.lowest
        forward = _between(of.discount, (a - of.lowest) / range_ - of.jump)
        inverted = _between(of.discount_inverted, (below - of.lowest) / range_)
        relative = (1 + forward) * wanted[0] - unwanted[0], (1 + inverted) * unwanted[1] - wanted[1]
        return self.of_reward(torch.stack(relative)).mean(0)


def _between(ends: tuple[float, float], place: float) -> float:
    """Interpolate from the first of ``ends`` at place 0 to the second at place 1."""
    return ends[0] + place * (ends[1] - ends[0])
