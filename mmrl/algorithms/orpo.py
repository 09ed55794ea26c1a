"""ORPO: likelihood of the chosen response and odds against the rejected one, no reference (arXiv 2403.07691, eq. 6).

    l = mean log-prob of a response's tokens,   log odds = l - log(1 - exp(l))
    L = -l of the chosen - beta log sigmoid(log odds of the chosen - log odds of the rejected)

Departs: the likelihood is a mean over pairs of means over tokens, as in the paper. TRL takes the mean over all tokens
of a batch, which depends on how pairs are batched.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import logsigmoid

from mmrl.algorithms.pairs import PairObjective
from mmrl.config.algorithm_settings import PairSettings

_LARGEST = -1e-6
"""Mean log-probs are at most this: the odds of a certain response are infinite."""


class ORPOSettings(PairSettings):
    """Odds ratio preference optimisation (Hong et al. 2024, arXiv 2403.07691)."""

    beta: PositiveFloat = 0.1
    """Weight of the odds against the likelihood; the paper calls it lambda."""


class ORPO(PairObjective):
    """Final class; see ``mmrl.algorithms.objective.Offline``."""

    def __init__(self, settings: ORPOSettings) -> None:
        self.beta = settings.beta
        self.needs = frozenset({"chosen_log_probs", "rejected_log_probs", "chosen_tokens", "rejected_tokens"})

    def pair_loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """``new``: chosen_log_probs and rejected_log_probs ``[B]``, summed over the response's tokens, and their
        numbers chosen_tokens and rejected_tokens ``[B]``."""
        chosen = new["chosen_log_probs"] / new["chosen_tokens"].clamp(min=1)
        rejected = new["rejected_log_probs"] / new["rejected_tokens"].clamp(min=1)
        h = log_odds(chosen) - log_odds(rejected)
        odds = -logsigmoid(h)
        return self.beta * odds - chosen, {
            "orpo/accuracy": (h > 0).float(),
            "orpo/log_odds_ratio": h,
            "orpo/odds_loss": odds,
            "orpo/likelihood_loss": -chosen,
        }


def log_odds(mean_log_prob: Tensor) -> Tensor:
    """``log(p / (1 - p))`` of ``p = exp(mean_log_prob)``, ``[B]``."""
    bounded = mean_log_prob.clamp(max=_LARGEST)
    return bounded - torch.log(-torch.expm1(bounded))
