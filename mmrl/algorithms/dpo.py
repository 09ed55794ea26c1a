"""DPO: a pair is classified by its implicit rewards (Rafailov et al. 2023, arXiv 2305.18290, eq. 7).

    h = beta [log(policy / reference) of the chosen - the same of the rejected]
    sigmoid: L = -(1 - e) log sigmoid(h) - e log sigmoid(-h),   hinge: L = max(0, 1 - h)
    ipo: L = (h' / beta - 1 / (2 beta))^2,   h' like h with means over tokens in place of sums

``e`` is label smoothing (conservative DPO, Mitchell 2023). ``hinge`` is SLiC's (arXiv 2305.10425) on these rewards
(RSO, arXiv 2309.06657). ``ipo``: arXiv 2310.12036, eq. 17. Reference-free: the reference's log-probs count as 0.

Departs: IPO's paper has log-probs of whole responses. Means over tokens are what its authors confirmed to TRL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from mmrl.algorithms.pairs import PairObjective
from mmrl.config.algorithm_settings import PairSettings
from mmrl.config.sampling import Sampling, TextSampling


class DPOSettings(PairSettings):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290)."""

    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference; IPO's paper calls it tau."""
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """The loss of a pair, by TRL's names."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs with swapped labels (conservative DPO); only for ``sigmoid``."""
    reference_free: bool = False
    """Take the reference as uniform: no reference model is needed."""

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free

    def conflicts(self, sampling: Sampling | TextSampling) -> Iterator[str]:
        yield from super().conflicts(sampling)
        if self.label_smoothing and self.loss_type != "sigmoid":
            yield (
                f"algorithm.label_smoothing: the {self.loss_type} loss has none; remove it, or set "
                "algorithm.loss_type: sigmoid"
            )


class DPO(PairObjective):
    """Final class; see ``mmrl.algorithms.objective.Offline``."""

    def __init__(self, settings: DPOSettings) -> None:
        self.settings = settings
        needs = {"chosen_log_probs", "rejected_log_probs"}
        if not settings.reference_free:
            needs |= {f"reference_{name}" for name in needs}
        if settings.loss_type == "ipo":
            needs |= {"chosen_tokens", "rejected_tokens"}
        self.needs = frozenset(needs)

    def pair_loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """``new``: chosen_log_probs and rejected_log_probs ``[B]``, summed over the response's tokens, the same of
        the reference as reference_chosen_log_probs and reference_rejected_log_probs, and for IPO the numbers of tokens
        as chosen_tokens and rejected_tokens ``[B]``."""
        beta, kind = self.settings.beta, self.settings.loss_type
        chosen, rejected = new["chosen_log_probs"], new["rejected_log_probs"]
        if not self.settings.reference_free:
            chosen = chosen - new["reference_chosen_log_probs"]
            rejected = rejected - new["reference_rejected_log_probs"]
        if kind == "ipo":
            chosen = chosen / new["chosen_tokens"].clamp(min=1)
            rejected = rejected / new["rejected_tokens"].clamp(min=1)
        h = beta * (chosen - rejected)
        if kind == "ipo":
            loss = (chosen - rejected - 1 / (2 * beta)).square()
        elif kind == "hinge":
            loss = relu(1 - h)
        else:
            e = self.settings.label_smoothing
            loss = -(1 - e) * logsigmoid(h) - e * logsigmoid(-h)
        return loss, {
            "dpo/accuracy": (h > 0).float(),
            "dpo/margin": h,
            "dpo/chosen_reward": beta * chosen,
            "dpo/rejected_reward": beta * rejected,
        }
