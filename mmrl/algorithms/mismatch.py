"""The mismatch between rollout engine and trainer: its size, and truncated importance weights that correct it.

The two compute the same log-probs with different kernels, precision or (if the engine lags) older weights. With
``d = log(trainer / engine)`` per token, before the step's updates:

- token     c_t = min(exp(d_t), cap)                     (truncated importance sampling, TIS: cap 2)
- sequence  c   = min(exp(sum_t d_t), cap), one per response

``mode: mask`` sets a weight beyond its limits to 0 in place of the limit. Rejection leaves out tokens or responses by
other statistics of ``d``: ``k1 = exp(-d)``, ``k2 = d^2 / 2``, ``k3 = exp(d) - d - 1``, of a token, or their sum, mean
or maximum over a response (for ``k1`` those of ``-d``, before exp). Rejected tokens still count in the loss's
denominator.

Token weights are biased and have a low variance; the product over a response is unbiased and has a high variance. The
cap of 2 is that of TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training") and
verl's. TRL's default is one weight per response, 0 above 3.

The weights of a batch may be divided by their mean over all its tokens, or responses (verl's
``rollout_is_batch_normalize``).

Departs: verl takes rejected tokens out of the denominator, too. Here the denominator is computed before the first slice
is recomputed, so they stay in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmrl.algorithms.policy_gradient import LOG_RATIO_BOUND
from mmrl.config.rollout import Rejection, Statistic

Level = Literal["token", "sequence", "none"]


@dataclass(frozen=True)
class Mismatch:
    """``weights`` is ``[B, T]`` (token, or where single tokens may be rejected), ``[B, 1]`` (sequence) or None; 1
    outside the mask.

    ``sums`` are over the ``tokens`` tokens of the batch, to be divided by their number, here or over all controllers;
    ``maxima`` need no division.
    """

    weights: Tensor | None
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]
    tokens: Tensor
    """A number on the device, as the sums are."""


@dataclass(frozen=True)
class Correction:
    """How the weights are computed; see ``Rollout`` in ``mmrl/config/rollout.py``."""

    level: Level
    cap: float = 2.0
    floor: float = 0.0
    mode: Literal["truncate", "mask"] = "truncate"
    rejection: Sequence[Rejection] = ()


def mismatch(
    trainer: Tensor, engine: Tensor, mask: Tensor, correction: Correction, scale: Tensor | float = 1.0
) -> Mismatch:
    """Compare log-probs of the same tokens, ``trainer`` and ``engine`` ``[B, T]``, inside ``mask`` ``[B, T]``.

    ``scale``: divides the weights, after their limits (their mean over the batch, from ``summed_weights`` of all
    slices).

    The engine drew the tokens, so that ``mismatch/kl`` (k1) and ``mismatch/kl_k3`` estimate the divergence of the
    engine from the trainer, in nats per token. ``mismatch/log_prob_gap`` is the mean of ``|d|``;
    ``mismatch/weight_mean`` (after the limits), ``mismatch/weight_clipped`` and ``mismatch/rejected`` are means over
    tokens, too.
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
    if correction.level != "none":
        weights, beyond = limited(d, correction)
        weights = weights / scale
        logged |= {"mismatch/weight_mean": weights, "mismatch/weight_clipped": beyond.to(d.dtype)}
    if correction.rejection:
        kept = accepted(d, inside, correction.rejection)
        weights = kept if weights is None else weights * kept
        logged |= {"mismatch/rejected": 1 - kept, "mismatch/weight_mean": weights}
    sums = {name: (value * inside).sum() for name, value in logged.items()}
    maxima = {"mismatch/log_prob_gap_max": gap.max() if gap.numel() else gap.sum()}
    return Mismatch(weights, sums, maxima, inside.sum().float())


def limited(d: Tensor, correction: Correction) -> tuple[Tensor, Tensor]:
    """Weights within their limits, and which were clipped, ``[B, T]`` for tokens or ``[B, 1]`` for responses; ``d``
    ``[B, T]`` is 0 outside the mask."""
    log_weights = d if correction.level == "token" else d.sum(1, keepdim=True)
    raw = log_weights.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    beyond = (raw > correction.cap) | (raw < correction.floor)
    cut = raw.clamp(correction.floor, correction.cap)
    return torch.where(beyond, 0.0, raw) if correction.mode == "mask" else cut, beyond


def summed_weights(trainer: Tensor, engine: Tensor, mask: Tensor, correction: Correction) -> tuple[Tensor, Tensor]:
    """The sum of the weights, within their limits and before rejection, and how many they are: tokens, or responses
    with a token. The arguments are those of ``mismatch``."""
    inside = mask > 0
    weights, _ = limited(torch.where(inside, trainer.detach() - engine.detach(), 0.0), correction)
    counted = inside if correction.level == "token" else inside.any(1, keepdim=True)
    return (weights * counted).sum(), counted.sum().to(weights.dtype)


def accepted(d: Tensor, inside: Tensor, rejection: Sequence[Rejection]) -> Tensor:
    """1 where every test of ``rejection`` is passed and 0 elsewhere: ``[B, T]``, or ``[B, 1]`` if all tests are of
    responses. ``d`` ``[B, T]`` is trainer minus engine, 0 outside ``inside``."""
    kept = torch.ones_like(d[:, :1])
    for test in rejection:
        value = statistic(d, inside, test.statistic)
        good = value <= test.high
        if test.statistic.endswith("k1"):
            good &= value >= (1 / test.high if test.low is None else test.low)
        kept = kept * (good | ~inside if good.shape == inside.shape else good).to(d.dtype)
    return kept


def statistic(d: Tensor, inside: Tensor, name: Statistic) -> Tensor:
    """``[B, T]`` for tokens, ``[B, 1]`` for responses; a response without a token has the value of ``d = 0``."""
    of, _, estimator = name.rpartition("_")
    bounded = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    values = {"k1": d, "k2": 0.5 * d.square(), "k3": bounded.exp() - bounded - 1}[estimator]
    if of != "token":
        values = torch.where(inside, values, 0.0)
        whole = values.amax(1, keepdim=True) if of == "seq_max" else values.sum(1, keepdim=True)
        values = whole / inside.sum(1, keepdim=True).clamp(min=1) if of == "seq_mean" else whole
    return (-values).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp() if estimator == "k1" else values
