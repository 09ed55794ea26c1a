"""A scalar reward model from pairs, by the model of Bradley and Terry (1952).

    L = -log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2

The margin is a column of the data (Llama 2, arXiv 2307.09288, eq. 2), else 0; the second term keeps scores near 0
(Eisenstein et al. 2023, arXiv 2312.09244).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import logsigmoid

from mmrl.algorithms.pairs import PairObjective
from mmrl.config.algorithm_settings import PairSettings
from mmrl.config.section import NonNegative


class RewardModelSettings(PairSettings):
    """A scalar reward model from pairs (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155)."""

    trains_scores: ClassVar[bool] = True
    center_coef: NonNegative = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores about 0 (Eisenstein et al. 2023, arXiv
    2312.09244, with 0.01)."""


class RewardModel(PairObjective):
    """Final class; see ``mmrl.algorithms.objective.Offline``."""

    def __init__(self, settings: RewardModelSettings) -> None:
        self.center_coef = settings.center_coef
        self.needs = frozenset({"chosen_scores", "rejected_scores"})

    def pair_loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """``new``: chosen_scores and rejected_scores ``[B]``; ``old``: optionally margins ``[B]``."""
        chosen, rejected = new["chosen_scores"], new["rejected_scores"]
        difference = chosen - rejected
        loss = -logsigmoid(difference - old["margins"] if "margins" in old else difference)
        if self.center_coef:
            loss = loss + self.center_coef * (chosen + rejected).square()
        return loss, {
            "reward_model/accuracy": (difference > 0).float(),
            "reward_model/margin": difference,
            "reward_model/score": (chosen + rejected) / 2,
        }
