"""Count floating-point operations from shapes; a multiplication and an addition are two, as vendors count.

Counted are matrix products, convolutions and attention (torch's formulas, ``torch.utils.flop_counter``, and here those
of the CPU's attention kernel); all other operations are negligible. Attention is counted in full, causal or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from mmrl.planner.fake_shapes import Operator


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of encoding a prompt, of sampling and decoding a micro-batch, and of a training slice
    (forward and backward, on all devices that share it); ``forward``: of the policy's first call in the slice.

    For text ``sample`` is the prompt's forward and one token's; for an engine with its own copy of the weights it is 0.
    """

    encode: int
    sample: int
    decode: int
    train: int
    forward: int


def mean_of(work: Sequence[tuple[Operations, float]]) -> Operations:
    """The mean of several kinds of rows, each with its share."""
    if len(work) == 1:
        return work[0][0]
    sums = {f.name: sum(getattr(of, f.name) * share for of, share in work) for f in fields(Operations)}
    return Operations(**{name: round(n) for name, n in sums.items()})


def attention(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Operations of the scores and of the weighted values, for ``[..., S, D]``."""
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def attention_backward(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Operations of the recomputed scores, and of the gradients of scores, values, queries and keys."""
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def times_expert(a: Tensor, b: Tensor) -> int:
    """Operations of rows ``[N, I]`` times their group's matrix in ``[G, I, J]``; or of ``[I, N]`` times ``[N, J]``."""
    return 2 * a.numel() * b.shape[-1]


_Formula = Callable[[Sequence[object], object], int]


def operations_of(func: Operator, args: Sequence[object], out: object) -> int:
    """The operations of one call of an operator."""
    formula = _formula(func)
    return 0 if formula is None else formula(args, out)


def tensors_of(args: Sequence[object]) -> list[Tensor]:
    """The tensors among the arguments of an operation."""
    return [given for given in args if isinstance(given, Tensor)]


@cache
def _formula(func: Operator) -> _Formula | None:
    packet = getattr(func, "overloadpacket", None)
    aten = torch.ops.aten
    if packet is getattr(aten, "_scaled_dot_product_flash_attention_for_cpu", ...):
        return lambda args, _: attention(*tensors_of(args[:3]))
    if packet is getattr(aten, "_scaled_dot_product_flash_attention_for_cpu_backward", ...):
        return lambda args, _: attention_backward(*tensors_of(args[1:4]))
    if packet is getattr(aten, "_grouped_mm", ...):
        return lambda args, _: times_expert(*tensors_of(args[:2]))
    known = flop_registry.get(packet)
    return None if known is None else lambda args, out: known(*args, out_val=out)
