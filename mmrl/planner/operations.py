"""Count the operators of a step from shapes: how often each is called, its bytes, and its floating-point operations.

Floating-point operations are those of matrix products, convolutions and attention (torch's formulas,
``torch.utils.flop_counter``, and here those of the CPU's attention kernel); a multiplication and an addition are two,
as vendors count. Attention is counted in full, causal or not.
"""

# The private names of torch below have no public equivalent.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from math import prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from mmrl.planner.fake_shapes import Operator, leaves


class Call(NamedTuple):
    """An operator as the estimate of time reads it, once for all calls with these values.

    ``kind``: ``view``, ``product``, ``attention`` or ``convolution`` (both with ``_backward``), else its name in ATen.
    ``sizes``: of a product (batch, rows, inner, columns), of attention (heads, queries, keys, width), of a convolution
    (channels, pixels), else empty. ``flops``: multiplications and additions of products, convolutions and attention.
    ``nbytes``: read and written. ``mode``: ``forward`` without a graph, ``graph`` with one, or ``backward``.
    """

    kind: str
    dtype: str
    sizes: tuple[int, ...]
    flops: int
    nbytes: int
    mode: str


class Work(Counter[Call]):
    """How often each operator is called."""

    @property
    def flops(self) -> int:
        """Floating-point operations of products, convolutions and attention."""
        return sum(call.flops * n for call, n in self.items())

    @property
    def launches(self) -> int:
        """The operators that compute something: all but views."""
        return sum(n for call, n in self.items() if call.kind != "view")

    def times(self, factor: float) -> Work:
        """``factor`` times as many calls, which need not be whole."""
        return Work({call: n * factor for call, n in self.items()})  # type: ignore[misc]  # a Counter holds any number

    def since(self, before: Work) -> Work:
        """The calls that came after ``before`` was copied."""
        return Work({call: n - before[call] for call, n in self.items() if n != before[call]})


@dataclass(frozen=True)
class Operations:
    """The operators of encoding a prompt, of sampling and decoding a micro-batch, of a training slice (forward and
    backward, on all devices that share it) and of an optimizer step; ``forward``: of the policy's first call in the
    slice.

    For text ``sample`` is the prompt's forward and one token's; for an engine with its own copy of the weights it is
    empty. ``token`` is one token's.
    """

    encode: Work
    sample: Work
    decode: Work
    train: Work
    forward: Work
    optimizer: Work = field(default_factory=Work)
    token: Work = field(default_factory=Work)


def mean_of(work: Sequence[tuple[Operations, float]]) -> Operations:
    """The mean of several kinds of rows, each with its share."""
    if len(work) == 1:
        return work[0][0]
    sums = {f.name: sum_of([getattr(of, f.name).times(share) for of, share in work]) for f in fields(Operations)}
    return Operations(**sums)


def sum_of(works: Iterable[Work]) -> Work:
    """The calls of all of them."""
    total = Work()
    for work in works:
        total.update(work)
    return total


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


def call_of(func: Operator, args: Sequence[object], kwargs: Mapping[str, object] | None, out: object) -> Call:
    """What one call of an operator is, by its arguments and its result."""
    kind = _kind(func)
    given = [x for x in leaves(args, kwargs) if isinstance(x, Tensor)]
    made = out if isinstance(out, Tensor) else next((x for x in _listed(out) if isinstance(x, Tensor)), None)
    of = next(iter(given), made) if made is None or kind in _PRODUCTS else made
    dtype = "" if of is None else NAMES_OF[of.dtype]
    without = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
    mode = "graph" if torch.is_grad_enabled() else without
    if kind == "view" or of is None:
        return Call("view", "", (), 0, 0, mode)
    if kind in _COPYING and given[-1].ndim > 1 and given[-1].stride(-1) != 1:
        kind = "transpose"
    formula, sizes = _formula(func), ()
    flops = 0 if formula is None else formula(args, out)
    written = sum(x.nbytes for x in _listed(out) if isinstance(x, Tensor))
    nbytes = 2 * written if kind in _PICKING else written + sum(x.nbytes for x in given)
    if kind in _PRODUCTS:
        sizes = _SIZES[kind.removesuffix("_backward")](given, flops)
    return Call(kind, dtype, sizes, flops, nbytes, mode)


def _product_sizes(given: Sequence[Tensor], flops: int) -> tuple[int, ...]:
    a = [x for x in given if x.ndim >= 2][-2]
    batch = a.shape[0] if a.ndim > 2 else 1
    return batch, a.shape[-2], a.shape[-1], flops // max(1, 2 * batch * a.shape[-2] * a.shape[-1])


def _attention_sizes(given: Sequence[Tensor], flops: int) -> tuple[int, ...]:
    query, key = [x for x in given if x.ndim == 4][-2 if len(given) == 2 else 0 :][:2]
    return prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1]


def _convolution_sizes(given: Sequence[Tensor], flops: int) -> tuple[int, ...]:
    of = [x for x in given if x.ndim > 2]
    weight, x = of[-1], of[0]
    return round(sqrt(weight.shape[0] * weight.shape[1])), x.numel() // max(1, x.shape[1])


_SIZES = {"product": _product_sizes, "attention": _attention_sizes, "convolution": _convolution_sizes}
_PRODUCTS = frozenset(f"{name}{end}" for name in _SIZES for end in ("", "_backward"))
_PICKING = frozenset({"index", "embedding", "gather", "index_select", "scatter", "slice_scatter", "select_scatter"})
"""Operators that touch as much of a table as they return."""
_COPYING = frozenset({"clone", "copy_", "_to_copy"})
_NOTHING = frozenset(
    {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh", "detach"}
)
"""Operators that touch no data, as views do."""
NAMES_OF = {of: str(of).removeprefix("torch.") for of in vars(torch).values() if isinstance(of, torch.dtype)}


def _listed(out: object) -> Sequence[object]:
    return out if isinstance(out, list | tuple) else (out,)


@cache
def _kind(func: Operator) -> str:
    name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
    if getattr(func, "is_view", False) or name in _NOTHING:
        return "view"
    formula = _formula(func)
    end = "_backward" if "backward" in name else ""
    if "convolution" in name:
        return f"convolution{end}"
    if "attention" in name:
        return f"attention{end}"
    return "product" if formula is not None else name


def tensors_of(args: Sequence[object]) -> list[Tensor]:
    """The tensors among the arguments of an operation."""
    return [given for given in args if isinstance(given, Tensor)]


@cache
def _formula(func: Operator) -> _Formula | None:
    packet = getattr(func, "overloadpacket", None)
    known = flop_registry.get(packet)
    if known is None:
        return _FORMULAS.get(str(packet))
    return lambda args, out: known(*args, out_val=out)


_FORMULAS: dict[str, _Formula] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": lambda args, _: attention(*tensors_of(args[:3])),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": lambda args, _: attention_backward(
        *tensors_of(args[1:4])
    ),
    "aten._grouped_mm": lambda args, _: times_expert(*tensors_of(args[:2])),
}
"""Those of operators that torch counts none of."""
