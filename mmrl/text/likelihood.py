"""Log-probabilities of given response tokens, recomputed with a graph."""

from __future__ import annotations

import torch
from torch import Tensor


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probs ``[B, T]`` float32 of ``tokens`` ``[B, T]`` under ``logits`` ``[B, T, V]`` at ``temperature``.

    Row by row where the graph is not kept, so that half-precision logits are not held in float32 all at once.
    """
    if torch.is_grad_enabled():
        return _of(logits, tokens, temperature)
    return torch.stack([_of(row, picked, temperature) for row, picked in zip(logits, tokens, strict=True)])


def entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy ``[B, T]`` in nats of ``logits`` ``[B, T, V]`` at ``temperature``."""
    log_probs = torch.log_softmax(logits.float() / temperature, -1)
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)  # 0 log 0 = 0


def _of(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    scaled = logits.float() / temperature
    return scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)
