"""KTO: trains on good and bad responses without pairs (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 7-8).

    r = log(policy / reference) of the response, z = max(0, mean of the same over responses of other prompts)
    L = mean of desirable_weight (1 - sigmoid(beta (r - z))) of a good response,
                undesirable_weight (1 - sigmoid(beta (z - r))) of a bad one

``z`` estimates the divergence from the reference and has no gradient. Each prompt is given the response of the prompt
before it in the step, and ``z`` is the mean over the whole step, on all controllers.

Departs: TRL (like the authors' code) takes ``z`` over a micro-batch of all processes, so that it depends on how a step
is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.advantages import AllSum
from mmrl.algorithms.objective import Loss, OfflineObjective
from mmrl.config.algorithm_settings import ResponseSettings

RATIO = "mismatched_log_ratio"


class KTOSettings(ResponseSettings):
    """Kahneman-Tversky optimisation on good and bad responses (Ethayarajh et al. 2024, arXiv 2402.01306)."""

    mismatches: ClassVar[bool] = True
    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of good responses; balances unequal numbers of good and bad ones."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of bad responses."""
    labels: str = "label"
    """The column of the data that says whether a response is good (true) or bad (false)."""

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def label_column(self) -> str | None:
        return self.labels


class KTO(OfflineObjective):
    """Final class; see ``mmrl.algorithms.objective.ComparesBatch``. ``B`` is a number of responses."""

    needs = frozenset({"completion_log_probs", "reference_completion_log_probs"})
    prepares = frozenset({RATIO})

    def __init__(self, settings: KTOSettings) -> None:
        self.settings = settings

    def of_batch(self, columns: Mapping[str, Tensor], weights: Tensor, all_sum: AllSum) -> dict[str, Tensor]:
        """``kl`` ``[B]``: ``z``, the same for every response."""
        ratio = columns[RATIO].double()
        total, count = all_sum(torch.stack([(ratio * weights).sum(), weights.double().sum()]))
        return {"kl": (total / count.clamp(min=1)).clamp(min=0).float().expand(len(ratio)).clone()}

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """``new``: completion_log_probs and reference_completion_log_probs ``[B]``, summed over the response's tokens;
        ``old``: labels ``[B]`` (1 good, 0 bad), kl ``[B]``, weights ``[B]`` (0 leaves a response out).

        ``kto/margin`` is ``beta (r - z)``, and its negative for bad responses; ``kto/accuracy`` says how often it is
        above 0."""
        s, weights = self.settings, old["weights"]
        good = old["labels"] > 0
        sign = torch.where(good, 1.0, -1.0).to(weights.dtype)
        ratio = new["completion_log_probs"] - new["reference_completion_log_probs"]
        margin = sign * s.beta * (ratio - old["kl"])
        weight = weights.new_tensor([s.undesirable_weight, s.desirable_weight])[good.long()]
        value = weight * torch.sigmoid(-margin)  # 1 - sigmoid(margin)
        logged = {
            "policy/loss": value,
            "kto/accuracy": (margin > 0).float(),
            "kto/margin": margin,
            "kto/kl": old["kl"],
        }
        return Loss(
            value=(value * weights).sum() / total,
            sums={name: (v.detach() * weights).sum() for name, v in logged.items()},
            maxima={},
        )
