"""Log-probabilities of given response tokens, recomputed with a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 1 << 25
"""Logits that are held in float32 at once (128 MiB)."""


class Vocabulary(NamedTuple):
    """The part of a vocabulary that this rank has logits of, from the token ``first``; ``group`` has the whole."""

    first: int
    group: dist.ProcessGroup


class Saved(Protocol):
    """What a function of autograd saves in ``forward`` for its ``backward``."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float, vocabulary: Vocabulary | None = None) -> Tensor:
    """Log-probs ``[B, T]`` float32 of ``tokens`` ``[B, T]`` under ``logits`` ``[B, T, V]`` at ``temperature``.

    Many logits are held in float32 a ``CHUNK`` at a time, on the way back, too.
    ``vocabulary``: each rank has logits ``[B, T, V_rank]`` of its part, and all come to the same; no logits cross.
    """
    if vocabulary is not None:
        return _PickedOfAll.apply(logits.float() / temperature, tokens, vocabulary)  # type: ignore[no-any-return]
    return _Picked.apply(logits, tokens, temperature)  # type: ignore[no-any-return]


def entropy(logits: Tensor, temperature: float, vocabulary: Vocabulary | None = None) -> Tensor:
    """Entropy ``[B, T]`` in nats of ``logits`` ``[B, T, V]`` at ``temperature``; ``vocabulary`` as above."""
    if vocabulary is not None:
        return _EntropyOfAll.apply(logits.float() / temperature, vocabulary)  # type: ignore[no-any-return]
    log_probs = torch.log_softmax(logits.float() / temperature, -1)
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)  # 0 log 0 = 0


class _SavedSettings(Saved, Protocol):
    temperature: float
    dtype: torch.dtype


class _Picked(torch.autograd.Function):
    """``log_softmax`` and ``gather``, whose gradient is ``grad * (onehot - softmax)``. There is no second derivative.

    Autograd's own keeps several tensors ``[B, T, V]`` in float32. Here many logits are kept as they are, and the
    softmax is computed once more on the way back, as in Cut Cross-Entropy (arXiv 2411.09009), which computes the logits
    again, too. Of a few their log-probs are kept.
    """

    @staticmethod
    def forward(ctx: _SavedSettings, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:  # type: ignore[override]
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        if logits.numel() <= CHUNK:
            log_probs = _softmax(logits, temperature)
            ctx.save_for_backward(log_probs, tokens)
            return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(logits, tokens)
        parts = zip(_chunks(logits), _chunks(tokens, logits.shape[-1]), strict=True)
        found = [_softmax(part, temperature).gather(-1, picked.unsqueeze(-1)).squeeze(-1) for part, picked in parts]
        return torch.cat(found).view_as(tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: _SavedSettings, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (kept, tokens), temperature = ctx.saved_tensors, ctx.temperature
        if kept.numel() <= CHUNK:
            return _slope(kept.exp(), tokens, grad, temperature).to(ctx.dtype), None, None
        out, width = torch.empty_like(kept, memory_format=torch.contiguous_format), kept.shape[-1]
        each = _chunks(kept), _chunks(out), _chunks(tokens, width), _chunks(grad, width)
        for logits, into, index, of in zip(*each, strict=True):
            into.copy_(_slope(_softmax(logits, temperature).exp_(), index, of, temperature))
        return out, None, None


def head_log_probs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, barred: Tensor | None = None
) -> Tensor:
    """Log-probs ``[K]`` float32 of ``tokens`` ``[K]`` under the logits of ``hidden`` ``[K, H]`` by the output layer
    ``weight`` ``[V, H]``, of which there is never more than a ``CHUNK``. ``barred`` ``[N]``: tokens that nobody draws.

    Products are in the dtype of autocast where that is on, else in the weight's. There is no second derivative.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return _OfHead.apply(hidden, weight, tokens, temperature, dtype, barred)  # type: ignore[no-any-return]


class _SavedHead(_SavedSettings, Protocol):
    barred: Tensor | None
    needs_input_grad: tuple[bool, ...]


class _OfHead(torch.autograd.Function):
    """``_Picked`` behind a product with the output layer.

    The gradient of a log-prob by its hidden state, ``(weight[token] - softmax weight) / temperature``, is made on the
    way forward, where its softmax is: what comes back only scales it. That by the weight needs the softmax of every
    place with what comes back. So it is computed again where the layer trains, as in Cut Cross-Entropy (arXiv
    2411.09009)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _SavedHead,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        temperature: float,
        dtype: torch.dtype,
        barred: Tensor | None,
    ) -> Tensor:
        ctx.temperature, ctx.dtype, ctx.barred = temperature, dtype, barred
        layer, found, slopes = weight.to(dtype), list[Tensor](), list[Tensor]()
        for states, index in _places(hidden, weight, tokens):
            log_probs = _softmax(_without(states.to(dtype) @ layer.T, barred), temperature)
            found.append(log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1))
            if ctx.needs_input_grad[0]:
                away = log_probs.exp_().to(dtype) @ layer
                slopes.append(((layer[index] - away) / temperature).to(hidden.dtype))
        ctx.save_for_backward(hidden, weight, tokens, *([torch.cat(slopes)] if slopes else []))
        return torch.cat(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: _SavedHead, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:  # type: ignore[override]
        hidden, weight, tokens, *slopes = ctx.saved_tensors
        of_states = slopes[0] * grad.unsqueeze(-1).to(hidden.dtype) if slopes else None
        if not ctx.needs_input_grad[1]:
            return of_states, None, None, None, None, None
        layer, out = weight.to(ctx.dtype), torch.zeros_like(weight, dtype=torch.float32)
        for states, index, of in _places(hidden, weight, tokens, grad):
            probs = _softmax(_without(states.to(ctx.dtype) @ layer.T, ctx.barred), ctx.temperature).exp_()
            out += (_slope(probs, index, of, ctx.temperature).to(ctx.dtype).T @ states.to(ctx.dtype)).float()
        return of_states, out.to(weight.dtype), None, None, None, None


def _without(logits: Tensor, barred: Tensor | None) -> Tensor:
    return logits if barred is None or not len(barred) else logits.index_fill_(-1, barred, -torch.inf)


def _places(hidden: Tensor, weight: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of ``hidden`` and of ``columns`` whose logits are at most ``CHUNK``; at least one place."""
    n = max(1, CHUNK // len(weight))
    return zip(hidden.split(n), *(column.split(n) for column in columns), strict=True)


def _slope(probs: Tensor, tokens: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """The gradient by the logits, written over ``probs``."""
    of = grad.unsqueeze(-1)
    found = probs.mul_(-of).scatter_add_(-1, tokens.unsqueeze(-1), of)
    return found if temperature == 1 else found.div_(temperature)


def _chunks(values: Tensor, width: int | None = None) -> tuple[Tensor, ...]:
    """Parts of ``values`` ``[B, T, ...]``, flattened over both: so many places that their logits, ``width`` each (None:
    the last dimension), are at most ``CHUNK``; at least one."""
    return values.flatten(0, 1).split(max(1, CHUNK // (width or values.shape[-1])))


def _softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-probs in float32."""
    return torch.log_softmax(logits if temperature == 1 else logits.float() / temperature, -1, dtype=torch.float32)


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
