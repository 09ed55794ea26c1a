"""Log-probabilities of given response tokens, recomputed with a graph."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class Vocabulary(NamedTuple):
    """The part of a vocabulary that this rank has logits of, from the token ``first``; ``group`` has the whole."""

    first: int
    group: dist.ProcessGroup


class Saved(Protocol):
    """What a function of autograd saves in ``forward`` for its ``backward``."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _SavedDtype(Saved, Protocol):
    dtype: torch.dtype


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float, vocabulary: Vocabulary | None = None) -> Tensor:
    """Log-probs ``[B, T]`` float32 of ``tokens`` ``[B, T]`` under ``logits`` ``[B, T, V]`` at ``temperature``.

    Row by row where the graph is not kept, so that half-precision logits are not held in float32 all at once.
    ``vocabulary``: each rank has logits ``[B, T, V_rank]`` of its part, and all come to the same; no logits cross.
    """
    if vocabulary is not None:
        return _PickedOfAll.apply(logits.float() / temperature, tokens, vocabulary)  # type: ignore[no-any-return]
    if torch.is_grad_enabled():
        return _of(logits, tokens, temperature)
    return torch.stack([_of(row, picked, temperature) for row, picked in zip(logits, tokens, strict=True)])


def entropy(logits: Tensor, temperature: float, vocabulary: Vocabulary | None = None) -> Tensor:
    """Entropy ``[B, T]`` in nats of ``logits`` ``[B, T, V]`` at ``temperature``; ``vocabulary`` as above."""
    if vocabulary is not None:
        return _EntropyOfAll.apply(logits.float() / temperature, vocabulary)  # type: ignore[no-any-return]
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
    def forward(ctx: _SavedDtype, logits: Tensor, tokens: Tensor) -> Tensor:  # type: ignore[override]
        log_probs = torch.log_softmax(logits, -1, dtype=torch.float32)
        index = tokens.unsqueeze(-1)
        ctx.save_for_backward(log_probs, index)
        ctx.dtype = logits.dtype
        return log_probs.gather(-1, index).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: _SavedDtype, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        log_probs, index = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        out = log_probs.exp().mul_(-grad).scatter_add_(-1, index, grad)
        return out.to(ctx.dtype), None


def _shared(logits: Tensor, *sums: Tensor, group: dist.ProcessGroup, most: Tensor) -> list[Tensor]:
    """The logarithm of the partition function less ``most``, and ``sums``, ``[B, T]`` each, added over all ranks."""
    added = torch.stack([(logits - most.unsqueeze(-1)).exp().sum(-1), *sums])
    dist.all_reduce(added, group=group)
    return [added[0].log(), *added[1:]]


def _most(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest logit of any rank, ``[B, T]``; a rank may have none."""
    none = logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    most = torch.cat([logits, none], -1).amax(-1)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return most


class _PickedOfAll(torch.autograd.Function):
    """``_Picked`` where each rank has logits of a part: three small tensors ``[B, T]`` cross, and none on the way back
    (as Megatron-LM's vocabulary-parallel cross entropy, arXiv 1909.08053, section 3)."""

    @staticmethod
    def forward(ctx: Saved, logits: Tensor, tokens: Tensor, vocabulary: Vocabulary) -> Tensor:  # type: ignore[override]
        first, group = vocabulary
        here = (tokens >= first) & (tokens < first + logits.shape[-1])
        index = torch.where(here, tokens - first, 0).unsqueeze(-1)
        most = _most(logits, group)
        padded = logits if logits.shape[-1] else logits.new_zeros(*logits.shape[:-1], 1)
        own = torch.where(here, padded.gather(-1, index).squeeze(-1) - most, 0.0)
        partition, picked = _shared(logits, own, group=group, most=most)
        ctx.save_for_backward(logits, most + partition, index, here)
        return picked - partition

    @staticmethod
    @once_differentiable
    def backward(ctx: Saved, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, partition, index, here = ctx.saved_tensors
        out = (logits - partition.unsqueeze(-1)).exp_().mul_(-grad.unsqueeze(-1))
        if out.shape[-1]:
            out.scatter_add_(-1, index, (grad * here).unsqueeze(-1))
        return out, None, None


class _EntropyOfAll(torch.autograd.Function):
    """Entropy where each rank has logits of a part: ``log Z - sum p x``, whose gradient is ``-p (log p + H)``."""

    @staticmethod
    def forward(ctx: Saved, logits: Tensor, vocabulary: Vocabulary) -> Tensor:  # type: ignore[override]
        group = vocabulary.group
        most = _most(logits, group)
        less = logits - most.unsqueeze(-1)
        weighed = (less.exp() * less.clamp(min=torch.finfo(less.dtype).min)).sum(-1)  # 0 log 0 = 0
        partition, weighed = _shared(logits, weighed, group=group, most=most)
        found = partition - weighed / partition.exp()
        ctx.save_for_backward(less, partition, found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Saved, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        less, partition, found = ctx.saved_tensors
        log_probs = (less - partition.unsqueeze(-1)).clamp(min=torch.finfo(less.dtype).min)
        return -(grad.unsqueeze(-1) * log_probs.exp() * (log_probs + found.unsqueeze(-1))), None
