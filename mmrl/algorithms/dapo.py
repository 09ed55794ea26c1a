"""DAPO: GRPO with a higher upper clip, a mean over all tokens and a penalty on overlong responses (arXiv 2503.14476).

    A = (r + overlong_penalty punishment(length) - mean of its group) / (std + 1e-4)
    L = mean over all tokens of max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))

The training loop does the dynamic sampling (``dynamic_sampling``): it replaces the groups that ``flat_groups`` names,
by their rewards before the length punishment. ``advantage/overlong_fraction`` is the share of responses punished.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.advantages import Advantages, group_advantages
from mmrl.algorithms.objective import Scored
from mmrl.algorithms.policy_gradient import ClippedObjective
from mmrl.config.algorithm_settings import AggregationMode, ClippedSettings, Spread, TurnSettings, length_limit
from mmrl.config.section import Fraction, NonNegative


class DAPOSettings(ClippedSettings, TurnSettings):
    """Decoupled clip and dynamic sampling (Yu et al. 2025, arXiv 2503.14476)."""

    clip_high: PositiveFloat = 0.28
    aggregation: AggregationMode = "token_mean"
    advantage_std: Spread = "group"
    overlong_buffer: Fraction = 0.2
    """Share of max_new_tokens, at its end, over which the length punishment grows from 0 to overlong_penalty (4096 of
    20480 tokens in the paper); 0 switches it off."""
    overlong_penalty: NonNegative = 1.0
    """The largest length punishment."""
    dynamic_sampling: bool = True


class DAPO(ClippedObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``."""

    def __init__(self, settings: DAPOSettings) -> None:
        super().__init__(settings, settings.aggregation)
        self.overlong_penalty = settings.overlong_penalty
        self.limit = length_limit(settings) if settings.overlong_buffer and settings.overlong_penalty else 0
        self.buffer = round(settings.overlong_buffer * self.limit)

    def advantages(self, scored: Scored) -> Advantages:
        rewards, metrics = scored.rewards, {}
        if self.buffer:
            assert scored.mask is not None
            punishment = overlong_punishment(scored.mask.sum(1), self.limit, self.buffer)
            rewards = rewards + self.overlong_penalty * punishment
            metrics = {"advantage/overlong_fraction": (punishment < 0).double().mean().item()}
        return replace(group_advantages(rewards, scored.groups, self.advantage_std, scored.all_sum), metrics=metrics)


def overlong_punishment(lengths: Tensor, limit: int, buffer: int) -> Tensor:
    """Soft overlong punishment of ``lengths`` ``[B]`` in tokens (DAPO, eq. 13), float64 in [-1, 0].

    0 up to ``limit - buffer``, then it falls linearly to -1 at ``limit`` and stays there.
    """
    return ((limit - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0)
