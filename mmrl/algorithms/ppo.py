"""PPO with a critic for tokens: GAE, a clipped ratio and clipped values (arXiv 1707.06347; arXiv 2203.02155).

    L = mean over tokens of max(-A ratio, -A clip(ratio)) + 1/2 max((V - R)^2, (clip(V, V_old -+ value_clip) - R)^2)

``A`` is GAE over rewards minus the divergence, whitened over the batch's tokens; ``R = A + V_old`` before whitening.
The critic shares no weights with the policy, so its term needs no coefficient, only a learning rate (``critic_lr``). A
response cut at the length limit counts as finished: its return is not bootstrapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.advantages import Advantages, flat_groups
from mmrl.algorithms.objective import Scored
from mmrl.algorithms.policy_gradient import ClippedObjective
from mmrl.algorithms.returns import gae, token_rewards, whiten
from mmrl.config.algorithm_settings import AggregationMode, ClippedSettings, CriticSettings
from mmrl.config.section import Fraction, NonNegative


class PPOSettings(ClippedSettings, CriticSettings):
    """Proximal policy optimisation with a critic per token (Schulman et al. 2017; Ouyang et al. 2022)."""

    aggregation: AggregationMode = "token_mean"
    kl_coef: NonNegative = 0.05
    """Weight of each token's divergence, which is subtracted from its reward (TRL's default)."""
    gamma: Fraction = 1.0
    """Discount of later rewards."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    value_clip: PositiveFloat = 0.2
    """Clip range of a new value around the value before the step's updates."""

    uses_token_rewards: ClassVar[bool] = True
    divergence_in_loss: ClassVar[bool] = False

    @property
    def compares_group(self) -> bool:
        return False


class PPO(ClippedObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``. ``old`` has values and returns ``[B, T]`` too."""

    def __init__(self, settings: PPOSettings) -> None:
        super().__init__(settings, settings.aggregation, kl_in_loss=False)
        self.gamma, self.gae_lambda = settings.gamma, settings.gae_lambda
        self.value_clip = settings.value_clip
        self.needs = self.needs | {"values"}
        self.prepares = self.prepares | {"values"}

    def advantages(self, scored: Scored) -> Advantages:
        assert scored.mask is not None
        assert scored.values is not None
        valid, flat = torch.isfinite(scored.rewards), flat_groups(scored.rewards, scored.groups)
        rewards, metrics = token_rewards(scored, self.reward_kl_coef)
        estimate = gae(rewards, scored.values, scored.mask, self.gamma, self.gae_lambda)
        counted = (scored.mask > 0) & valid.unsqueeze(1)
        returns = torch.where(counted, estimate + scored.values.double(), 0.0)
        metrics |= {"value/explained_variance": explained_variance(returns, scored.values, counted)}
        values = whiten(estimate, counted, scored.all_sum)
        return Advantages(values.float(), valid, len(flat), int(flat.sum()), returns.float(), metrics)

    def terms(
        self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], inside: Tensor
    ) -> dict[str, tuple[float, Tensor]]:
        values, before, returns = (
            torch.where(inside, tensor, 0.0) for tensor in (new["values"], old["values"], old["returns"])
        )
        loss, clipped = clipped_value_loss(values, before, returns, self.value_clip)
        return super().terms(new, old, inside) | {"value/loss": (1.0, loss), "value/clip_fraction": (0.0, clipped)}


def clipped_value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Half the squared error of ``values``, or of ``values`` clipped to ``before`` +- ``clip``, whichever is larger.

    Returns it and where the clipped one was larger, so that the gradient is 0 (0 or 1), in the shape of ``values``.
    """
    free = (values - returns).square()
    held = (before + (values - before).clamp(-clip, clip) - returns).square()
    return 0.5 * torch.maximum(free, held), (held > free).float()


def explained_variance(returns: Tensor, values: Tensor, counted: Tensor) -> float:
    """``1 - var(returns - values) / var(returns)`` over ``counted``; 0 where the returns do not vary."""
    r, v = returns[counted].double(), values[counted].double()
    spread = r.var(correction=0) if len(r) else r.sum()
    return (1 - (r - v).var(correction=0) / spread).item() if spread > 0 else 0.0
