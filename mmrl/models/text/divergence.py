"""The divergence of a student's next-token distribution from a teacher's, over the whole vocabulary.

With ``p`` the student's probabilities and ``q`` the teacher's, both at one temperature, per token in nats:

    reverse  KL(p, q) = sum p (log p - log q),    slope by the student's logits   p (log p - log q - KL)
    forward  KL(q, p) = sum q (log q - log p),                                    p - q
    mixed    half of each
    jensen   (1 - a) KL(p, m) + a KL(q, m),  m = (1 - a) p + a q,               (1 - a) p (log p - log m - KL(p, m))

Agarwal et al. 2024 (GKD, arXiv 2306.13649) have both on the student's own tokens, and NeMo-RL their mixture; TRL's
``beta`` between 0 and 1 is the ``a`` of ``jensen``. Logits of a vocabulary are in memory for a part of the places at a
time: the slope by what the output layer is given is made on the way forward, as Liger's fused losses have it (arXiv
2410.10989).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmrl.models.text.likelihood import CHUNK, Saved

Kind = Literal["reverse", "forward", "mixed", "jensen"]


class Outputs(NamedTuple):
    """What a model says at ``K`` places: the ``states`` ``[K, H]`` that its output ``layer`` ``[V, H]`` gets, or with
    no layer the logits ``[K, V]`` themselves."""

    states: Tensor
    layer: Tensor | None = None

    @property
    def vocabulary(self) -> int:
        return self.states.shape[1] if self.layer is None else len(self.layer)


class _How(NamedTuple):
    """``dtype``: of products with an output layer. ``barred`` ``[N]``: tokens that nobody draws; ``V``: the tokens that
    both models have logits of; ``alpha``: the teacher's share of ``m``."""

    kind: Kind
    temperature: float
    dtype: torch.dtype
    barred: Tensor
    vocabulary: int
    alpha: float


def divergence(
    student: Outputs,
    teacher: Outputs,
    kind: Kind,
    temperature: float,
    barred: Tensor | None = None,
    *,
    alpha: float = 0.5,
) -> Tensor:
    """``[K]`` float32, float64 where the states are; with a gradient by the student's states and layer alone.

    ``barred``: tokens that both are without. ``alpha``: of ``jensen``, above 0 and below 1. Where one model has more
    logits (a padded vocabulary), the others count. There is no second derivative.
    """
    device = student.states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else student.states.dtype
    none = torch.zeros(0, dtype=torch.long, device=student.states.device) if barred is None else barred
    how = _How(kind, temperature, dtype, none, min(student.vocabulary, teacher.vocabulary), alpha)
    return _Divergence.apply(student.states, student.layer, teacher.states.detach(), teacher.layer, how)  # type: ignore[no-any-return]


class _Kept(Saved, Protocol):
    how: _How
    has_layer: tuple[bool, bool]
    needs_input_grad: tuple[bool, ...]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _Kept, states: Tensor, layer: Tensor | None, other: Tensor, head: Tensor | None, how: _How
    ) -> Tensor:
        values, slopes = list[Tensor](), list[Tensor]()
        for at in _parts(len(states), how.vocabulary):
            value, slope = _both(_log_probs(states[at], layer, how), _log_probs(other[at], head, how), how)
            values.append(value)
            if ctx.needs_input_grad[0]:
                slopes.append(_by_states(slope, states, layer, how))
        ctx.how, ctx.has_layer = how, (layer is not None, head is not None)
        layers = [one for one in (layer, head) if one is not None]
        again = [states, other, *layers] if ctx.needs_input_grad[1] else []
        ctx.save_for_backward(torch.cat(slopes) if slopes else states.new_zeros(0), *again)
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Kept, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:  # type: ignore[override]
        slopes, *again = ctx.saved_tensors
        of_states = slopes * grad.unsqueeze(-1).to(slopes.dtype) if ctx.needs_input_grad[0] else None
        if not again:
            return of_states, None, None, None, None
        states, other, *layers = again
        layer, head, how = layers[0], layers[1] if ctx.has_layer[1] else None, ctx.how
        out = torch.zeros_like(layer, dtype=torch.promote_types(layer.dtype, torch.float32))
        for at in _parts(len(states), how.vocabulary):
            _, slope = _both(_log_probs(states[at], layer, how), _log_probs(other[at], head, how), how)
            slope *= grad[at].unsqueeze(-1) / how.temperature
            out[: how.vocabulary] += (slope.to(how.dtype).T @ states[at].to(how.dtype)).to(out.dtype)
        return of_states, out.to(layer.dtype), None, None, None


def _parts(places: int, vocabulary: int) -> list[slice]:
    """Slices of the places whose logits are at most half a ``CHUNK``: two models have some. At least one place."""
    n = max(1, CHUNK // 2 // vocabulary)
    return [slice(first, first + n) for first in range(0, places, n)] or [slice(0, 0)]


def _log_probs(states: Tensor, layer: Tensor | None, how: _How) -> Tensor:
    """``[k, V]``, at least float32; of a barred token the least number there is, whose probability is 0."""
    v = how.vocabulary
    logits = states[:, :v] if layer is None else states.to(how.dtype) @ layer[:v].to(how.dtype).T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / how.temperature
    if len(how.barred):
        logits = logits.index_fill(1, how.barred, torch.finfo(logits.dtype).min)
    return torch.log_softmax(logits, -1)


def _both(p: Tensor, q: Tensor, how: _How) -> tuple[Tensor, Tensor]:
    """The divergence ``[k]`` of log-probs ``[k, V]``, and its slope ``[k, V]`` by the student's scaled logits."""
    kind = how.kind
    if kind == "jensen":
        return _jensen(p, q, how.alpha)
    probs, gap = p.exp(), p - q
    reverse = (probs * gap).sum(-1)
    if kind == "reverse":
        return reverse, probs * (gap - reverse.unsqueeze(-1))
    theirs = q.exp()
    forward, slope = -(theirs * gap).sum(-1), probs - theirs
    if kind == "forward":
        return forward, slope
    return (reverse + forward) / 2, (probs * (gap - reverse.unsqueeze(-1)) + slope) / 2


def _jensen(p: Tensor, q: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    middle = torch.logaddexp(p + math.log(1 - alpha), q + math.log(alpha))
    probs, gap = p.exp(), p - middle
    mine, theirs = (probs * gap).sum(-1), (q.exp() * (q - middle)).sum(-1)
    slope = (1 - alpha) * probs * (gap - mine.unsqueeze(-1))
    return (1 - alpha) * mine + alpha * theirs, slope


def _by_states(slope: Tensor, states: Tensor, layer: Tensor | None, how: _How) -> Tensor:
    """The slope by what was given, of that by the scaled logits."""
    slope = slope / how.temperature
    if layer is not None:
        return (slope.to(how.dtype) @ layer[: how.vocabulary].to(how.dtype)).to(states.dtype)
    return torch.nn.functional.pad(slope, (0, states.shape[1] - how.vocabulary)).to(states.dtype)
