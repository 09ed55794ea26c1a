"""DRPO: a smooth penalty on the shift of a token's probability, no clip (Yao et al. 2026, arXiv 2606.09821).

    L = -A ratio + |A| mu (ratio - 1)^2 / (2 epsilon),   mu = probability of the token when it was sampled

The gradient of a token is that of the policy gradient times ``1 - sign(A (ratio - 1)) |policy - mu| / epsilon``: it
falls as the token's probability moves in the direction of its advantage, and turns beyond ``epsilon``. A rare token,
whose ratio moves easily, is hardly bound. Nothing is clipped: ``policy/clip_fraction`` counts tokens beyond epsilon.

Departs: ``mu`` is of the policy that trains, before the step's updates, and an engine's mismatch has its importance
weight; the authors' code takes the engine's own probabilities for mu and the ratio.
"""

from __future__ import annotations

from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.policy_gradient import Surrogate, TokenObjective
from mmrl.config.algorithm_settings import AdvantageAggregation, AggregationMode, Spread, TurnSettings


class DRPOSettings(TurnSettings):
    """Divergence regularised policy optimisation (Yao et al. 2026, arXiv 2606.09821)."""

    aggregation: AggregationMode = "seq_mean_token_sum_norm"
    advantage_std: Spread = "none"
    advantage_aggregation: AdvantageAggregation = "sum"
    epsilon: PositiveFloat = 12.5
    """The shift of a token's probability at which its gradient turns. The authors set 12.5, which no probability
    reaches: the penalty then only weakens gradients a little; below 1 it binds."""


class DRPO(TokenObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``."""

    def __init__(self, settings: DRPOSettings) -> None:
        super().__init__(settings, settings.aggregation)
        self.epsilon = settings.epsilon

    def surrogate(self, log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        ratio, mu = log_ratio.exp(), (log_probs - log_ratio).detach().exp()
        penalty = advantages.abs() * mu * (ratio - 1).square() / (2 * self.epsilon)
        shift = (mu * (ratio.detach() - 1)).where(mask > 0, 0.0)
        low, high = (shift < -self.epsilon) & (advantages < 0), (shift > self.epsilon) & (advantages > 0)
        return Surrogate(-advantages * ratio + penalty, ratio, low, high)
