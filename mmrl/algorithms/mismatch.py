"""The gap between the engine that sampled and the trainer: its size, and truncated importance weights against it.

The two compute the same log-probs with other kernels, precision or (an engine that lags) older weights. With
``d = log(trainer / engine)`` per token, before the step's updates:

- token     c_t = min(exp(d_t), cap)                     (truncated importance sampling, TIS: cap 2)
- sequence  c   = min(exp(sum_t d_t), cap), one a response

Token weights are biased and steady, a response's product unbiased and wild. The cap of 2 is that of TIS (Yao et al.
2025, "Your efficient RL framework secretly brings you off-policy RL training") and verl's; TRL 1.16 drops
responses past 3 instead, which is not built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmrl.algorithms.policy_gradient import LOG_RATIO_BOUND

Level = Literal["token", "sequence", "none"]


@dataclass(frozen=True)
class Mismatch:
    """``weights`` is ``[B, T]`` (token), ``[B, 1]`` (sequence) or None; 1 outside the mask.

    ``sums`` are over the ``tokens`` tokens of the batch and mean something once divided by their number, here or over
    all controllers; ``maxima`` stand as they are.
    """

    weights: Tensor | None
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]
    tokens: Tensor
    """A number on the device, as the sums are."""

    def metrics(self) -> dict[str, float]:
        """The means and maxima of this batch."""
        means = {name: (value / max(1.0, self.tokens.item())).item() for name, value in self.sums.items()}
        return means | {name: value.item() for name, value in self.maxima.items()}


def mismatch(trainer: Tensor, engine: Tensor, mask: Tensor, level: Level, cap: float = 2.0) -> Mismatch:
    """Compare log-probs of the same tokens, ``trainer`` and ``engine`` ``[B, T]``, inside ``mask`` ``[B, T]``.

    The engine drew the tokens, so that ``mismatch/kl`` (k1) and ``mismatch/kl_k3`` estimate the divergence of the
    engine from the trainer, in nats per token. ``mismatch/log_prob_gap`` is the mean of ``|d|``;
    ``mismatch/weight_mean`` (after the cap) and ``mismatch/weight_clipped`` are means over tokens too.
    """
    inside = mask > 0
    d = torch.where(inside, trainer.detach() - engine.detach(), 0.0)
    bounded = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    gap = d.abs()
    logged = {
        "mismatch/kl": -d,
        "mismatch/kl_k3": bounded.exp() - bounded - 1,
        "mismatch/log_prob_gap": gap,
    }
    weights = None
    if level != "none":
        log_weights = d if level == "token" else d.sum(1, keepdim=True)
        raw = log_weights.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        weights = raw.clamp(max=cap)
        logged |= {"mismatch/weight_mean": weights, "mismatch/weight_clipped": (raw > cap).to(d.dtype)}
    sums = {name: (value * inside).sum() for name, value in logged.items()}
    maxima = {"mismatch/log_prob_gap_max": gap.max() if gap.numel() else gap.sum()}
    return Mismatch(weights, sums, maxima, inside.sum().float())
