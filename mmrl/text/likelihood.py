"""Log-probabilities of given response tokens, recomputed with a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
    scaled = logits if temperature == 1 else logits.float() / temperature
    return _Picked.apply(scaled, tokens)  # type: ignore[no-any-return]


class _Picked(torch.autograd.Function):
    """``log_softmax`` and ``gather``, whose gradient is written in one tensor: ``grad * (onehot - softmax)``.

    Autograd's own takes five passes over ``[B, T, V]`` and as many tensors. There is no second derivative.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:  # type: ignore[override]
        log_probs = torch.log_softmax(logits, -1, dtype=torch.float32)
        index = tokens.unsqueeze(-1)
        ctx.save_for_backward(log_probs, index)
        ctx.dtype = logits.dtype
        return log_probs.gather(-1, index).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        log_probs, index = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        out = log_probs.exp().mul_(-grad).scatter_add_(-1, index, grad)
        return out.to(ctx.dtype), None
