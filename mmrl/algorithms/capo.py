"""CAPO: a judge finds wrong steps, and only their tokens lose reward (Xie et al. 2025, arXiv 2508.02298).

    R_t = outcome_weight r + step_weight s_t,   A_t = (R_t - mean) / std over all tokens of the group

``r`` is the response's reward (1 where a verifier accepts it); ``s_t`` is the reward of the single token, -1 in a step
that the vote over critiques (``mmrl.rewards.judging.modes``) finds wrong, so that with the paper's weights a token
earns 2, 1, 0 or -1. The loss is GRPO's.

Departs: the available sources give the mean; the division by the standard deviation is GRPO's. The loss is a mean
over all tokens, so that the advantages of a group's tokens sum to 0 in it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import PositiveFloat

from mmrl.algorithms.advantages import Advantages, token_group_advantages
from mmrl.algorithms.objective import Scored
from mmrl.algorithms.policy_gradient import ClippedObjective
from mmrl.config.algorithm_settings import AggregationMode, ClippedSettings
from mmrl.config.section import NonNegative


class CAPOSettings(ClippedSettings):
    """Credit for steps by a generative judge's critique (Xie et al. 2025, arXiv 2508.02298)."""

    aggregation: AggregationMode = "token_mean"
    outcome_weight: PositiveFloat = 2.0
    """Weight of the response's reward, which each of its tokens gets."""
    step_weight: NonNegative = 1.0
    """Weight of the rewards of single tokens: -1 in a wrong step, less where critiques were averaged. The paper finds
    that it must stay below outcome_weight."""

    uses_token_rewards: ClassVar[bool] = True


class CAPO(ClippedObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``."""

    def __init__(self, settings: CAPOSettings) -> None:
        super().__init__(settings, settings.aggregation)
        self.outcome_weight, self.step_weight = settings.outcome_weight, settings.step_weight

    def advantages(self, scored: Scored) -> Advantages:
        """If the batch has no rewards of tokens, every step counts as correct."""
        assert scored.mask is not None
        valid = torch.isfinite(scored.rewards)
        steps = torch.zeros_like(scored.mask) if scored.token_rewards is None else scored.token_rewards
        rewards = self.outcome_weight * scored.rewards.double().unsqueeze(1) + self.step_weight * steps.double()
        counted = scored.mask * valid.unsqueeze(1)
        values, groups, flat = token_group_advantages(rewards, counted, scored.groups)
        wrong = (counted * (steps < 0)).sum() / counted.sum().clamp(min=1)
        return Advantages(values, valid, groups, flat, metrics={"advantage/wrong_step_fraction": wrong.item()})
