"""Tensors with shapes and without data, with which a plan measures the memory of a step and its floating-point
operations."""

# The private names of torch below have no public equivalent.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mmrl.planner.fake_shapes import DEVICE, Operator, Shapes, leaves
from mmrl.planner.operations import Work, call_of, tensors_of


class LiveBytes(TorchDispatchMode):
    """``with LiveBytes() as live:`` counts the bytes of storages that are created inside the block and still alive
    (``now``), and their maximum (``peak``). Earlier tensors and their views do not count. ``work``: the operators that
    were called (``mmrl.planner.operations``)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.work = Work()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; this avoids the cost per operation of hiding this class from the compiler."""
        return False

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = _run(func, types, args, kwargs or {})
        if func is DEVICE:  # called more often than any computation
            return out
        self.work[call_of(func, args, kwargs, out)] += 1
        given: set[int] | None = None
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._alive:
                continue
            if given is None:
                inputs = (x for x in leaves(args, kwargs) if isinstance(x, Tensor))
                given = {x.untyped_storage()._cdata for x in inputs if x.layout == torch.strided}
            if key not in given:
                self._count(key, storage)
        return out

    def _count(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()

        def freed(_: object) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)

    def again(self, working: int, work: Work) -> None:
        """Count what was measured before: ``working`` bytes on top of what is alive now, and its operators."""
        self.peak = max(self.peak, self.now + working)
        self.work.update(work)


def _run(func: Operator, types: Sequence[type], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """The operation's result. Calls the fake tensors' mode directly, which saves two dispatches of torch."""
    mode = next((x.fake_mode for x in leaves(args, kwargs) if isinstance(x, FakeTensor)), None)
    return func(*args, **kwargs) if mode is None else mode.dispatch(func, types, args, kwargs)


class KnownMasks(TorchDispatchMode):
    """Inside the block, a mask picks as many entries of a fake tensor as of a real one, experts take tokens in every
    precision, and large masks have no data.

    A vision-language model puts its pictures at their placeholders. The placeholders are real, but torch does not count
    the entries of a mask on a fake tensor; so masks are replaced with their indices. The kernel that multiplies the
    tokens of each expert supports float32 too, but torch's shape rule only bfloat16; ``live`` counts its operations.
    What is made of real tokens is real: the mask of attention for two rows of 32,000 tokens would take 4 GB of the
    host's memory in each layer.
    """

    def __init__(self, live: LiveBytes | None = None) -> None:
        super().__init__()
        self._live = live
        self._mode: FakeTensorMode | None = None

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in _INDEXED:
            indices = args[1]
            assert isinstance(indices, list | tuple)
            args = (args[0], [i for given in indices for i in _counted(given)], *args[2:])
        if func is _GROUPED and isinstance(args[0], FakeTensor):
            a, b, *ends = tensors_of(args[:3])
            made = _product(a, b, *ends)
            if self._live is not None:
                self._live.work[call_of(func, args, kwargs, made)] += 1
            return made
        if func not in _INDEXED:
            args, kwargs = self._without_data(args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _without_data(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[Sequence[object], Mapping[str, object]]:
        """The arguments with large real tensors replaced by fake ones."""
        given = list(leaves(args, kwargs))
        self._mode = next((x.fake_mode for x in given if isinstance(x, FakeTensor)), self._mode)
        if self._mode is None or not any(_is_large(x) for x in given):
            return args, kwargs
        mode = self._mode
        return tree_map(lambda x: _faked(mode, x) if _is_large(x) else x, (args, dict(kwargs)))


_LARGE = 2**24
_LARGE_MASK = 2**18
"""Masks of attention have four dimensions; nothing is picked by them, and every block may make them anew."""


def _is_large(x: object) -> TypeGuard[Tensor]:
    if not isinstance(x, Tensor) or isinstance(x, FakeTensor) or x.is_meta:
        return False
    return x.numel() >= (_LARGE_MASK if x.ndim == 4 else _LARGE)


def _faked(mode: FakeTensorMode, x: Tensor) -> FakeTensor:
    shape = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return FakeTensor(mode, shape, torch.device("cpu"))


_INDEXED = frozenset(
    {
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        torch.ops.aten._index_put_impl_.default,
    }
)


_GROUPED = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)


def _product(a: Tensor, b: Tensor, ends: Tensor | None = None) -> Tensor:
    """Rows ``[N, I]`` of several groups times the matrix of their group in ``[G, I, J]``, as ``[N, J]``; or ``[I, N]``
    times ``[N, J]`` group by group, as ``[G, I, J]``."""
    if b.ndim == 3:
        return a.new_empty((len(a), b.shape[-1]))
    assert ends is not None
    return a.new_empty((len(ends), len(a), b.shape[-1]))


def _counted(index: Tensor | None) -> Iterable[Tensor | None]:
    if index is None or isinstance(index, FakeTensor) or index.dtype != torch.bool:
        return [index]
    return index.nonzero().unbind(1)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each storage counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def fake(modules: Iterable[nn.Module]) -> None:
    """Turn parameters, buffers and other tensors on the meta device into fake ones that behave as on a CPU, in place.

    On a device with kernels (a fake CPU) autocast and the choice of attention kernel work as in a real run.
    """
    mode = Shapes()
    device = torch.device("cpu")
    made: dict[int, Tensor] = {}  # tied weights stay tied
    for module in {id(m): m for root in modules for m in root.modules()}.values():
        for name, p in module._parameters.items():
            if p is not None and not isinstance(p, FakeTensor):
                its = nn.Parameter(FakeTensor(mode, p.data.to("meta"), device), requires_grad=p.requires_grad)
                module._parameters[name] = made.setdefault(id(p), its)  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None and not isinstance(buffer, FakeTensor):
                module._buffers[name] = made.setdefault(id(buffer), FakeTensor(mode, buffer.to("meta"), device))
        for name, table in list(vars(module).items()):  # such as position tables that are not buffers
            if isinstance(table, Tensor) and table.is_meta and not isinstance(table, FakeTensor):
                setattr(module, name, FakeTensor(mode, table, device))
