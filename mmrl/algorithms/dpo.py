"""DPO: a pair is classified by its implicit rewards (Rafailov et al. 2023, arXiv 2305.18290, eq. 7).

    h = beta [log(policy / reference) of the chosen - the same of the rejected]
    L = -(1 - e) log sigmoid(h) - e log sigmoid(-h)

``e`` is label smoothing (conservative DPO, Mitchell 2023). Reference-free: the reference's log-probs count as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.nn.functional import logsigmoid

from mmrl.algorithms.pairs import PairObjective
from mmrl.algorithms.settings import PairSettings


class DPOSettings(PairSettings):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290)."""

    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs believed to be labelled the wrong way round (conservative DPO)."""
    reference_free: bool = False
    """Take the reference as uniform: no reference model is needed."""

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free


class DPO(PairObjective):
    """Final class; see ``mmrl.algorithms.objective.Offline``."""

    def __init__(self, settings: DPOSettings) -> None:
        self.beta, self.label_smoothing = settings.beta, settings.label_smoothing
        self.reference_free = settings.reference_free
        policy = {"chosen_log_probs", "rejected_log_probs"}
        self.needs = frozenset(policy if self.reference_free else policy | {f"reference_{name}" for name in policy})

    def pair_loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """``new``: chosen_log_probs and rejected_log_probs ``[B]``, summed over the response's tokens, and the same of
        the reference as reference_chosen_log_probs and reference_rejected_log_probs."""
        chosen, rejected = new["chosen_log_probs"], new["rejected_log_probs"]
        if not self.reference_free:
            chosen = chosen - new["reference_chosen_log_probs"]
            rejected = rejected - new["reference_rejected_log_probs"]
        h = self.beta * (chosen - rejected)
        loss = -(1 - self.label_smoothing) * logsigmoid(h) - self.label_smoothing * logsigmoid(-h)
        return loss, {
            "dpo/accuracy": (h > 0).float(),
            "dpo/margin": h,
            "dpo/chosen_reward": self.beta * chosen,
            "dpo/rejected_reward": self.beta * rejected,
        }
