"""Shared code of the policy gradients over tokens: ratio, aggregation, KL to the reference, entropy and metrics.

    L = sum_t w_t [ c_t surrogate_t + kl_coef KL_t - entropy_coef H_t ] / total

``w`` are the weights of ``Aggregation``, ``c`` the truncated importance weights of a rollout engine
(``mmrl.algorithms.mismatch``) where there are any, ``KL`` one of Schulman's estimators ("Approximating KL divergence",
2020) with ``d = log(reference / policy)``: ``k1 = -d``, ``k2 = d^2 / 2``, ``k3 = exp(d) - d - 1`` (GRPO, arXiv
2402.03300, eq. 4).

``Aggregation`` reduces the losses of tokens to one number, with denominators that are global to an optimizer step. A
token's weight depends on its own response alone and the denominator is a sum over all controllers, so that any split of
the work into micro-batches and controllers has the same gradient. The names are those of verl:

- token_mean               sum over tokens / number of tokens              (DAPO)
- seq_mean_token_mean      mean over responses of the mean of their tokens (GRPO)
- seq_mean_token_sum       mean over responses of the sum of their tokens
- seq_mean_token_sum_norm  the same, divided by a constant                 (Dr.GRPO)

A response without a token does not count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmrl.algorithms.advantages import Advantages, group_advantages
from mmrl.algorithms.objective import Loss, Scored
from mmrl.config.algorithm_settings import (
    AggregationMode,
    ClippedSettings,
    KLEstimator,
    Spread,
    TokenSettings,
    length_limit,
)

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to it: exp would overflow, and infinity times a clipped gradient of 0 is NaN."""


@dataclass(frozen=True)
class Surrogate:
    """The policy's part of the loss and its ratio, ``[B, T]``, or ``[B, 1]`` where a response is one action.

    ``low`` and ``high`` mark where clipping sets the gradient to 0, below and above the range (bool, the same shape).
    """

    loss: Tensor
    ratio: Tensor
    low: Tensor
    high: Tensor


class TokenObjective(ABC):
    """Abstract; see ``mmrl.algorithms.objective.PolicyGradient``. A subclass has ``surrogate``;
    advantages are those of groups unless it has others."""

    kind: Literal["policy_gradient"] = "policy_gradient"
    advantage_std: Spread = "group"
    prepares: frozenset[str] = frozenset()
    entries: int | None = None

    def __init__(
        self,
        settings: TokenSettings,
        aggregation: AggregationMode = "seq_mean_token_mean",
        *,
        kl_in_loss: bool = True,
    ) -> None:
        """Where a response has one loss, ``aggregation`` is ``seq_mean_token_mean``, its mean over responses. Without
        ``kl_in_loss`` the subclass subtracts the divergence from rewards, times ``reward_kl_coef``.

        Raises ``UserError`` where a length limit is needed and neither section gives one.
        """
        self.advantage_std = getattr(settings, "advantage_std", self.advantage_std)
        self.kl_coef = settings.kl_coef if kl_in_loss else 0.0
        self.reward_kl_coef = 0.0 if kl_in_loss else settings.kl_coef
        if self.reward_kl_coef:
            self.prepares = self.prepares | {"log_probs", "reference_log_probs"}
        self.kl_estimator: KLEstimator = settings.kl_estimator
        self.kl_max = settings.kl_max
        self.entropy_coef = settings.entropy_coef
        norm = length_limit(settings) if aggregation == "seq_mean_token_sum_norm" else 1
        self.aggregation = Aggregation(aggregation, float(norm))
        extra = {"reference_log_probs": self.kl_coef, "entropy": self.entropy_coef}
        self.needs = frozenset({"log_probs"} | {name for name, coefficient in extra.items() if coefficient})

    def advantages(self, scored: Scored) -> Advantages:
        return group_advantages(scored.rewards, scored.groups, self.advantage_std, scored.all_sum)

    @abstractmethod
    def surrogate(self, log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        """``log_probs`` and ``log_ratio`` ``[B, T]`` with their graph, both 0 outside ``mask`` ``[B, T]`` (float);
        ``advantages`` ``[B, T]`` or ``[B, 1]``."""

    def loss_denominator(self, weights: Tensor, lengths: Tensor) -> float:
        """See ``Aggregation.loss_denominator``."""
        return self.aggregation.loss_denominator(weights, lengths)

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """The loss of some rows.

        ``new``: log_probs ``[B, T]``, and if needed or known reference_log_probs, entropy and values ``[B, T]``.
        ``old``: log_probs ``[B, T]``, advantages ``[B]`` or ``[B, T]``, weights ``[B]`` (0 leaves a row out), mask
        ``[B, T]``, optionally importance ``[B, T]`` or ``[B, 1]``. Values outside the mask may be anything. Ratios,
        fractions and divergences are logged as means over tokens or responses, whichever the aggregation averages.
        """
        inside = old["mask"] > 0
        mask, weights = inside.to(old["weights"].dtype), old["weights"]
        log_probs = torch.where(inside, new["log_probs"], 0.0)
        log_ratio = (log_probs - torch.where(inside, old["log_probs"], 0.0)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        advantages = old["advantages"] if old["advantages"].ndim == 2 else old["advantages"].unsqueeze(1)
        s = self.surrogate(log_probs, log_ratio, torch.where(inside, advantages, 0.0), mask)
        policy = s.loss * old["importance"] if "importance" in old else s.loss
        terms = self.terms(new, old, inside)
        loss = sum((c * value for c, value in terms.values() if c), start=policy)
        weighted = self.aggregation.loss_weights(weights, mask)
        mean = self.aggregation.mean_weights(weights, mask)
        logged = {
            "policy/ratio": s.ratio,
            "policy/clip_fraction": (s.low | s.high).float(),
            "policy/clip_fraction_low": s.low.float(),
            "policy/clip_fraction_high": s.high.float(),
            "policy/approx_kl": 0.5 * log_ratio.square(),
            **{name: value for name, (_, value) in terms.items()},
        }
        deviation = (log_ratio.detach().exp() - 1).abs() * mask * weights.unsqueeze(1)
        return Loss(
            value=(loss * weighted).sum() / total,
            sums={name: (value.detach() * mean).sum() for name, value in logged.items()}
            | {"policy/loss": (policy.detach() * weighted).sum()},
            maxima={"policy/ratio_max_dev": deviation.max()},
        )

    def terms(
        self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], inside: Tensor
    ) -> dict[str, tuple[float, Tensor]]:
        """Terms to add to the surrogate: a metric's name to its coefficient (0: only logged) and values ``[B, T]``."""
        out: dict[str, tuple[float, Tensor]] = {}
        if "reference_log_probs" in new:
            kl = divergence(new["log_probs"], new["reference_log_probs"], inside, self.kl_estimator, self.kl_max)
            out["policy/kl"] = (self.kl_coef, kl)
        if "entropy" in new:
            out["policy/entropy"] = (-self.entropy_coef, torch.where(inside, new["entropy"], 0.0))
        if "teacher_kl" in new:
            out["teacher/kl"] = (0.0, torch.where(inside, new["teacher_kl"], 0.0))
            out["teacher/loss"] = (1.0, torch.where(inside, new["teacher_loss"], 0.0))
        return out


class ClippedObjective(TokenObjective):
    """Abstract: the surrogate is PPO's, clipped to the ranges of the settings. A subclass has ``advantages``."""

    def __init__(
        self,
        settings: ClippedSettings,
        aggregation: AggregationMode = "seq_mean_token_mean",
        *,
        kl_in_loss: bool = True,
    ) -> None:
        super().__init__(settings, aggregation, kl_in_loss=kl_in_loss)
        self.clip = settings.clip

    def surrogate(self, log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        return clipped_surrogate(log_ratio, advantages, *self.clip)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None
) -> Surrogate:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) as a loss, with a lower and an upper range (DAPO, eq. 8).

    ``log_ratio`` and ``advantages`` broadcast to the shape of the result. With ``dual_clip`` a negative advantage
    counts at most that many times (arXiv 1912.09729, eq. 5).
    """
    ratio = log_ratio.exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    at = ratio.detach()
    above = (at > 1 + high) & (advantages > 0)
    if dual_clip is not None:
        negative = advantages < 0
        loss = torch.where(negative, torch.minimum(loss, -advantages * dual_clip), loss)
        above = above | ((at > dual_clip) & negative)
    return Surrogate(loss, ratio, (at < 1 - low) & (advantages < 0), above)


def divergence(
    log_probs: Tensor, reference: Tensor, inside: Tensor, estimator: KLEstimator = "k3", limit: float | None = None
) -> Tensor:
    """An estimate of the divergence from the reference, ``[B, T]``, in nats; 0 outside ``inside`` ``[B, T]`` (bool).

    ``limit`` clamps each value; its gradient is 0 beyond the limit. For a straight-through estimator only the value is
    clamped: the gradient is that of k2 everywhere, as in verl.
    """
    d = torch.where(inside, reference - log_probs, 0.0)

    def one(name: str) -> Tensor:
        value = -d if name == "k1" else 0.5 * d.square() if name == "k2" else k3(log_probs, reference, inside)
        return value if limit is None else value.clamp(-limit, limit)

    if not estimator.endswith("+"):
        return one(estimator)
    slope = 0.5 * d.square()
    return one(estimator[:2]).detach() + slope - slope.detach()


def k3(log_probs: Tensor, reference: Tensor, inside: Tensor) -> Tensor:
    """Schulman's k3 estimate of the divergence from the reference, ``[B, T]``, never negative; 0 outside."""
    d = torch.where(inside, reference - log_probs, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return d.exp() - d - 1


@dataclass(frozen=True)
class Aggregation:
    """``norm`` divides the sums of ``seq_mean_token_sum_norm``; the other modes do not read it."""

    mode: AggregationMode
    norm: float = 1.0

    def loss_denominator(self, weights: Tensor, lengths: Tensor) -> float:
        """Share of the denominator of rows with ``weights`` ``[B]`` (0 or 1) and ``lengths`` ``[B]`` tokens."""
        counted = weights.double() * (lengths > 0)
        return float((counted * lengths).sum() if self.mode == "token_mean" else counted.sum())

    def loss_weights(self, weights: Tensor, mask: Tensor) -> Tensor:
        """What each token's loss is multiplied by, ``[B, T]``: 0 outside ``mask`` ``[B, T]``."""
        rows = weights.unsqueeze(1) * mask
        if self.mode == "seq_mean_token_mean":
            return rows / mask.sum(1, keepdim=True).clamp(min=1)
        return rows / self.norm if self.mode == "seq_mean_token_sum_norm" else rows

    def mean_weights(self, weights: Tensor, mask: Tensor) -> Tensor:
        """Weights ``[B, T]`` under which a sum over tokens, divided by the same denominator, is a mean.

        The mean is over tokens, or over responses. The log weights ratios and fractions with it.
        """
        rows = weights.unsqueeze(1) * mask
        return rows if self.mode == "token_mean" else rows / mask.sum(1, keepdim=True).clamp(min=1)
