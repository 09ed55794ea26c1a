"""Measure what this machine's device takes for the operators of a step: products, convolutions, attention, elementwise
work, and starting an operator. ``mmrl doctor --calibrate`` keeps the result; ``mmrl.planner.estimate`` reads it.

Every measurement is (kind, dtype, sizes, work, seconds): ``work`` is in floating-point operations for products,
convolutions and attention, and in bytes read and written for the others. Operands come from memory, as in a step,
where other operators have filled the caches meanwhile. Nothing here is made from a recipe.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from mmrl.core.stored import Text
from mmrl.logging.environment import cpu_name
from mmrl.planner.fake_tensors import LiveBytes
from mmrl.planner.operations import NAMES_OF

ROUNDS, LEAST = 5, 0.008
"""A measurement is the median of so many rounds, each of at least so many seconds."""
_SIDES = {"cpu": (16, 64, 128, 256, 512), "cuda": (64, 256, 1024, 4096, 8192)}
_ROWS = {"cpu": (16, 128, 1024, 4096), "cuda": (64, 512, 4096, 16384)}
_MOST = {"cpu": 1.2e9, "cuda": 2.5e12}
"""Operations of the largest product that is measured."""
_BYTES = {"cpu": (1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26), "cuda": (1 << 20, 1 << 24, 1 << 28, 1 << 30)}
_POOL = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Bytes of the operands that an operator is timed with in turn: more than a core's cache, or a GPU's, holds."""
_SETS = 64
"""The most operands of one operator."""
_THIN = 16
"""The short side of a product with an adapter's matrix."""
Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False, strict=True)]
_SLOW = 0.2
"""Seconds after which larger sizes of the same kind and dtype are left out."""


class Timing(NamedTuple):
    """Seconds of one operator: ``sizes`` are of its kind (``mmrl.planner.operations.Call``)."""

    kind: Text
    dtype: Text
    sizes: Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 40)], ...], Field(max_length=8)]
    work: Annotated[float, Field(gt=0, le=1e18)]
    seconds: Seconds


@dataclass(frozen=True)
class Launches:
    """Seconds of the host to start an operator of a model: ``forward`` without a graph, ``graph`` with one,
    ``backward``; ``view`` of a view, ``bare`` of an operator that nothing is around."""

    view: Seconds
    bare: Seconds
    forward: Seconds
    graph: Seconds
    backward: Seconds


@dataclass(frozen=True)
class Over:
    """Whole models beside the sum of their operators: how often it they take in a ``forward`` and in ``train`` (forward
    and backward), and the seconds of the code that writes a ``token`` around its forward."""

    forward: Seconds = 1.0
    train: Seconds = 1.0
    token: Seconds = 1e-9


@dataclass(frozen=True)
class Calibration:
    """What was measured on ``device`` (its name; ``kind`` is cpu or cuda)."""

    device: Text
    kind: Literal["cpu", "cuda"]
    dtypes: tuple[Text, ...]
    launches: Launches
    timings: Annotated[tuple[Timing, ...], Field(min_length=1, max_length=10_000)]
    over: Over = Over()


def measure(device: torch.device | str = "cpu", dtypes: Sequence[torch.dtype] = (torch.float32,)) -> Calibration:
    """Measure a device: about 15 seconds for one dtype on a CPU."""
    of = torch.device(device)
    name = cpu_name() if of.type == "cpu" else torch.cuda.get_device_name(of)
    kind: Literal["cpu", "cuda"] = "cpu" if of.type == "cpu" else "cuda"
    timings = tuple(products(of, dtypes) + copies(of, dtypes))
    named = tuple(dict.fromkeys([*(NAMES_OF[dtype] for dtype in dtypes), *(one.dtype for one in timings)]))
    return Calibration(name, kind, named, launches(of), timings)


def timed(work: Callable[[], object], device: torch.device | str = "cpu", times: int = 1) -> float:
    """Seconds of one call. With one thread on a CPU it is the processor's time: neighbours do not count. ``times``: how
    often as long as else it is measured."""
    cuda = torch.device(device).type == "cuda"
    now = time.process_time if not cuda and torch.get_num_threads() == 1 else time.perf_counter

    def run(n: int) -> float:
        began = now()
        for _ in range(n):
            work()
        if cuda:
            torch.cuda.synchronize(device)
        return now() - began

    run(1)
    n = max(1, math.ceil(times * LEAST / max(run(2) / 2, 1e-7)))
    return statistics.median(run(n) / n for _ in range(ROUNDS))


def products(device: torch.device | str, dtypes: Sequence[torch.dtype]) -> list[Timing]:
    """Matrix products ``[rows, side] x [side, side]`` and those with an adapter's thin matrices, convolutions and
    attention, forward and backward."""
    kind = torch.device(device).type
    made: list[Timing] = []
    for dtype in dtypes:
        slow = False
        for side in _SIDES[kind]:
            for rows, inner, columns in [
                shape for n in _ROWS[kind] for shape in ((n, side, side), (n, side, _THIN), (n, _THIN, side))
            ]:
                flops = 2.0 * rows * inner * columns
                if flops > _MOST[kind] or slow:
                    continue
                a, b = torch.randn(rows, inner, device=device), torch.randn(inner, columns, device=device)
                given = a.to(dtype), b.to(dtype)
                made.append(_timing("product", dtype, (1, rows, inner, columns), flops, torch.matmul, given, device))
                slow = made[-1].seconds > _SLOW
        made += [*_attention(device, dtype), *_convolutions(device, dtype)]
        if kind == "cuda" and dtype == torch.float32:
            made += _tf32(device)
    return made


def _tf32(device: torch.device | str) -> Iterator[Timing]:
    """Float32 products in TensorFloat-32, as ``performance.tf32`` has them."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        for side in _SIDES["cuda"]:
            a = torch.randn(side, side, device=device)
            sizes, flops = (1, side, side, side), 2.0 * side**3
            made = _timing("product", torch.float32, sizes, flops, torch.matmul, (a, a), device)
            yield made._replace(dtype="tf32")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def copies(device: torch.device | str, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> list[Timing]:
    """Elementwise operators, norms, reductions and copies, by their names in ATen."""
    sizes = _BYTES[torch.device(device).type]
    return [one for dtype in dtypes for nbytes in sizes for one in _passes(device, dtype, nbytes)]


def launches(device: torch.device | str) -> Launches:
    """The cost of starting operators, by a small transformer whose tensors are tiny."""
    x = torch.ones(4, 4, device=device)
    block, inputs = _Blocks().to(device), torch.randn(2, 3, 16, device=device)
    with torch.no_grad():
        view, bare = timed(lambda: x.view(16), device), timed(lambda: x + x, device)
        with LiveBytes() as seen:
            block(inputs)
        views = seen.work.total() - seen.work.launches
        forward = max(timed(lambda: block(inputs), device) - views * view, bare) / seen.work.launches
    whole = timed(lambda: block(inputs).sum().backward(), device)
    with torch.enable_grad():
        with LiveBytes() as seen:
            block(inputs).sum().backward()
        graph = timed(lambda: block(inputs).sum(), device)
    back = sum(n for call, n in seen.work.items() if call.mode == "backward" and call.kind != "view")
    graphs = seen.work.launches - back
    views = sum(n for call, n in seen.work.items() if call.mode == "graph" and call.kind == "view")
    return Launches(view, bare, forward, max(graph - views * view, bare) / graphs, max(whole - graph, bare) / back)


class _Blocks(nn.Module):
    """Four blocks of a transformer, 16 wide, as the libraries write them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(16),
                    "q": nn.Linear(16, 16),
                    "k": nn.Linear(16, 16),
                    "v": nn.Linear(16, 16),
                    "out": nn.Linear(16, 16),
                    "up": nn.Linear(16, 32),
                    "act": nn.GELU(),
                    "down": nn.Linear(32, 16),
                }
            )
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            h = block["norm"](x)  # type: ignore[index]
            q, k, v = (block[name](h).view(2, 3, 2, 8).transpose(1, 2) for name in "qkv")  # type: ignore[index]
            h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 3, 16)
            x = x + block["out"](h) * 0.5  # type: ignore[index]
            x = x + block["down"](block["act"](block["up"](x)))  # type: ignore[index]
        return x


def _timing(
    kind: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    work: float,
    run: Callable[..., object],
    given: tuple[Tensor, ...],
    device: torch.device | str,
    made_of: Callable[..., tuple[object, ...]] = lambda *given: given,
) -> Timing:
    """Seconds of ``run(*made_of(*given))``, where ``made_of`` is not timed, with as many copies of ``given`` in turn as
    fill ``_POOL``."""
    copies = min(_SETS, _POOL[torch.device(device).type] // max(1, sum(x.nbytes for x in given)))
    pool = [made_of(*given)]
    pool += [made_of(*(x.detach().clone().requires_grad_(x.requires_grad) for x in given)) for _ in range(copies)]

    def each() -> None:
        for one in pool:
            run(*one)

    spent = timed(each, device) / len(pool)
    return Timing(kind, NAMES_OF[dtype], sizes, work, max(spent, 1e-9))


def _attention(device: torch.device | str, dtype: torch.dtype) -> Iterator[Timing]:
    """``[B, H, S, D]`` with as many scores at each length, forward and backward."""
    cuda = torch.device(device).type == "cuda"
    for length, width in ((16, 32), (64, 32), (256, 32), (64, 64), (1024, 64), *(((4096, 128),) if cuda else ())):
        heads = max(2, (1 << (26 if cuda else 18)) // (length * length))
        q, k, v = (torch.randn(1, heads, length, width, device=device).to(dtype).requires_grad_() for _ in range(3))
        flops = 4.0 * heads * length * length * width
        sizes = (heads, length, length, width)
        made = _both_ways("attention", sizes, (flops, 2.5 * flops), F.scaled_dot_product_attention, (q, k, v))
        yield from made
        if made[0].seconds > _SLOW:
            return


def _convolutions(device: torch.device | str, dtype: torch.dtype) -> Iterator[Timing]:
    """3 x 3 convolutions of a picture's channels, forward and backward."""
    cuda = torch.device(device).type == "cuda"
    sizes = (
        ((128, 64, 8), (512, 64, 2), (256, 256, 1)) if cuda else ((16, 32, 8), (32, 16, 8), (64, 16, 8), (64, 64, 1))
    )
    for channels, side, rows in sizes:
        x = torch.randn(rows, channels, side, side, device=device).to(dtype).requires_grad_()
        w = torch.randn(channels, channels, 3, 3, device=device).to(dtype).requires_grad_()
        flops = 2.0 * 9 * channels * channels * rows * side * side
        of = (channels, rows * side * side)
        made = _both_ways("convolution", of, (flops, 2 * flops), partial(F.conv2d, padding=1), (x, w))
        yield from made
        if made[0].seconds > _SLOW:
            return


def _both_ways(
    kind: str,
    sizes: tuple[int, ...],
    work: tuple[float, float],
    run: Callable[..., Tensor],
    given: tuple[Tensor, ...],
) -> tuple[Timing, Timing]:
    """Seconds of ``run`` and of its backward, each with its ``work``; the gradient that comes in is the result."""

    def graph(*given: Tensor) -> tuple[Tensor, ...]:
        return run(*given), *given

    def backward(out: Tensor, *given: Tensor) -> object:
        return torch.autograd.grad(out, given, out, retain_graph=True)

    dtype, device = given[0].dtype, given[0].device
    with torch.no_grad():
        forward = _timing(kind, dtype, sizes, work[0], run, given, device)
    return forward, _timing(f"{kind}_backward", dtype, sizes, work[1], backward, given, device, graph)


def _passes(device: torch.device | str, dtype: torch.dtype, nbytes: int) -> Iterator[Timing]:
    """Elementwise operators on tensors ``[rows, 128]`` that together have about so many bytes."""
    size = torch.empty((), dtype=dtype).element_size()
    rows = max(1, nbytes // (2 * 128 * size))
    x, y = (torch.randn(rows, 128, device=device).to(dtype) for _ in range(2))
    w, b = (torch.ones(128, device=device, dtype=dtype) for _ in range(2))
    index = torch.randint(rows, (rows,), device=device)
    aten, one = torch.ops.aten, x.nbytes
    normed = aten.native_layer_norm(x, [128], w, b, 1e-5)
    works: list[tuple[str, float, Callable[[Tensor, Tensor], object]]] = [
        ("add", 3, lambda x, y: x + y),
        ("mul", 2, lambda x, _: x * 0.5),
        ("clone", 2, lambda x, _: x.view(1, rows, 4, 32).transpose(1, 2).contiguous()),
        ("transpose", 2, lambda x, _: x.t().contiguous()),
        ("cat", 4, lambda x, y: torch.cat([x, y])),
        ("pow", 2, lambda x, _: x.pow(2)),
        ("mean", 1, lambda x, _: x.mean(-1)),
        ("gelu", 2, lambda x, _: aten.gelu(x, approximate="tanh")),
        ("gelu_backward", 3, lambda x, y: aten.gelu_backward(y, x, approximate="tanh")),
        ("silu", 2, lambda x, _: aten.silu(x)),
        ("silu_backward", 3, lambda x, y: aten.silu_backward(y, x)),
        ("exp", 2, lambda x, _: x.exp()),
        ("_log_softmax", 2, lambda x, _: aten._log_softmax(x, -1, False)),
        ("native_layer_norm", 2, lambda x, _: aten.native_layer_norm(x, [128], w, b, 1e-5)),
        (
            "native_layer_norm_backward",
            3,
            lambda x, y: aten.native_layer_norm_backward(y, x, [128], *normed[1:], w, b, [True, True, True]),
        ),
        ("index", 2, lambda x, _: x[index]),
        ("normal_", 1, lambda x, _: x.new_empty(x.shape).normal_()),
    ]
    if rows >= 32:
        side, ones = x.numel() // 32, torch.ones(32, device=device, dtype=dtype)

        def group_norm(x: Tensor, _: Tensor) -> object:
            return aten.native_group_norm(x.view(1, 32, side), ones, ones, 1, 32, side, 8, 1e-5)

        works.append(("native_group_norm", 2, group_norm))
    with torch.no_grad():
        for name, times, run in works:
            yield _timing(name, dtype, (), times * one, run, (x, y), device)
