"""RAFT: best-of-N fine-tuning, the likelihood of each prompt's best responses by reward (Dong et al., 2304.06767).

    L = - sum over the kept responses and their tokens of log policy(token | prompt, earlier tokens) / number of tokens
    kept: the ``keep`` responses of a group with the highest rewards

With verifiers it is rejection sampling (expert iteration) that takes at most ``keep`` right responses of a prompt.

Departs: a group whose rewards are all equal is left out, since none of it is best; the paper takes one all the same.
Of equal rewards the sample that was drawn first is kept. New responses are drawn in every step; the paper trains
several epochs on a batch.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor

from mmrl.algorithms.advantages import Advantages, group_advantages, uneven
from mmrl.algorithms.objective import Scored
from mmrl.algorithms.policy_gradient import Surrogate, TokenObjective
from mmrl.config.algorithm_settings import AggregationMode, TokenSettings


class RAFTSettings(TokenSettings):
    """Reward-ranked fine-tuning (Dong et al. 2023, arXiv 2304.06767): best-of-N, with training on the best."""

    trains_few: ClassVar[bool] = True
    aggregation: AggregationMode = "token_mean"
    keep: PositiveInt = 1
    """Responses of a group that train: those with the highest rewards. N is train.group_size."""


class RAFT(TokenObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``. Advantages are 1 for what is kept, else 0."""

    def __init__(self, settings: RAFTSettings) -> None:
        super().__init__(settings, settings.aggregation)
        self.keep = settings.keep

    def advantages(self, scored: Scored) -> Advantages:
        plain = group_advantages(scored.rewards, scored.groups, "none")
        values = torch.zeros_like(plain.values)
        for rows, inside in uneven(plain, scored.groups):
            values[rows[inside.sort(descending=True, stable=True).indices[: self.keep]]] = 1.0
        return Advantages(values, values > 0, plain.groups, plain.zero_std_groups)

    def surrogate(self, log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        never = torch.zeros_like(log_probs, dtype=torch.bool)
        return Surrogate(-advantages * log_probs, log_ratio.exp(), never, never)
