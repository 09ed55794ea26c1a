"""Reduce the losses of tokens to one number, with denominators that are global to an optimizer step.

A token's weight depends on its own response alone and the denominator is a sum over all controllers, so that any split
of the work into micro-batches and controllers has the same gradient. The names are those of verl:

- token_mean               sum over tokens / number of tokens              (DAPO)
- seq_mean_token_mean      mean over responses of the mean of their tokens (GRPO)
- seq_mean_token_sum       mean over responses of the sum of their tokens
- seq_mean_token_sum_norm  the same, divided by a constant                 (Dr.GRPO)

A response without a token does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmrl.algorithms.settings import AggregationMode


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
