"""torch's mode for fake tensors, with a faster cache of output shapes for plans.

A model repeats the same operations on the same shapes, block by block. Torch caches their results too, but a look-up
takes longer than most operations on real numbers, and a plan does little else.
"""

# The private names of torch below have no public equivalent.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Operator: TypeAlias = torch._ops.OpOverload
"""An operation of torch, for one set of argument types."""
DEVICE = torch.ops.prim.device.default
_UNLIKE = (torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Tags of operations that change the shape of an input, or whose result depends on more than shapes."""
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format})


class _Made(NamedTuple):
    """An output: input number ``of`` itself, or (with ``size``) a view of it, or (without ``of``) a new tensor."""

    of: int | None
    size: torch.Size | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    device: torch.device | None = None


class _Known(NamedTuple):
    """What an operation returns: a ``kind`` (list, tuple) of outputs, or one output if ``kind`` is None."""

    kind: type | None
    outputs: list[_Made | None]


_KNOWN: dict[tuple[Hashable, ...] | None, _Known | None] = {}
"""Of all plans of this process: recipes that are alike share most of their operations."""
_MOST = 1 << 15
"""Operations that are kept, some 40 MB; a plan has about 1,500 different ones."""


class Shapes(FakeTensorMode):
    """Final class. torch itself runs operations with real tensors among their inputs, and those whose result varies."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's own cache

    def dispatch(
        self,
        func: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is DEVICE:
            assert isinstance(args[0], FakeTensor)
            return torch.device("meta") if self.in_kernel_invocation else args[0].fake_device
        kwargs = kwargs or {}
        inputs = list(leaves(args, kwargs))
        key = _key(func, args, kwargs)
        known = _KNOWN.get(key)
        if known is not None:
            outputs = [self._again(made, inputs) for made in known.outputs]
            return outputs[0] if known.kind is None else known.kind(outputs)
        out = super().dispatch(func, types, args, kwargs)
        if key is not None and key not in _KNOWN:
            if len(_KNOWN) >= _MOST:
                _KNOWN.clear()
            _KNOWN[key] = _learned(out, inputs)
        return out

    def _again(self, made: _Made | None, inputs: list[object]) -> object:
        if made is None:
            return None
        if made.size is None:
            return inputs[made.of or 0]
        tensor = torch.empty_strided(made.size, made.stride, dtype=made.dtype, device="meta")
        if made.of is not None:
            viewed = inputs[made.of]
            assert isinstance(viewed, Tensor)
            tensor.set_(viewed.untyped_storage(), made.offset, made.size, made.stride)
        return FakeTensor(self, tensor, made.device)


def leaves(args: Sequence[object], kwargs: Mapping[str, object] | None) -> Iterator[object]:
    """The arguments of an operation, with lists flattened."""
    for given in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(given, list | tuple):
            yield from given
        else:
            yield given


def _key(func: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Hashable, ...] | None:
    """A cache key: everything that the operation's result depends on; None if that is not known."""
    if torch.is_inference_mode_enabled() or not _by_shapes(func):
        return None
    parts: list[Hashable] = [func, torch.get_default_dtype(), *kwargs]
    for given in (*args, *kwargs.values()):
        several = isinstance(given, list | tuple)
        keys = [_argument_key(one) for one in given] if several else [_argument_key(given)]
        if None in keys:
            return None
        parts += [len(keys), *keys] if several else keys
    return tuple(parts)


@cache
def _by_shapes(func: Callable[..., object]) -> bool:
    """Whether the shape of the result depends only on the shapes of the inputs."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    return not any(tag in _UNLIKE for tag in func.tags)


def _argument_key(given: object) -> tuple[Hashable, ...] | None:
    """The part of an argument that shapes depend on; None if that is not known."""
    if isinstance(given, FakeTensor):
        if given.constant is not None or given.layout != torch.strided or given.dtype.is_complex or given.is_quantized:
            return None
        return given.shape, given.stride(), given.dtype, given.storage_offset(), given.fake_device
    kind = type(given)  # 1, 1.0 and True are equal
    return (kind, given) if kind in _PLAIN else None


def _learned(out: object, inputs: list[object]) -> _Known | None:
    """How to make ``out`` again from other inputs of the same shapes; None if that is impossible."""
    kind = (list if isinstance(out, list) else tuple) if isinstance(out, list | tuple) else None  # or a named tuple
    storages = {x.untyped_storage()._cdata: i for i, x in reversed([*enumerate(inputs)]) if isinstance(x, Tensor)}
    outputs: list[_Made | None] = []
    for one in out if isinstance(out, list | tuple) else [out]:
        if one is None:
            outputs.append(None)
            continue
        same = next((i for i, x in enumerate(inputs) if x is one), None)
        if same is not None:
            outputs.append(_Made(same))
            continue
        if not isinstance(one, FakeTensor) or _argument_key(one) is None or one.requires_grad:
            return None
        storage, size, stride = one.untyped_storage(), one.shape, one.stride()
        of = storages.get(storage._cdata)
        if of is None:  # must not be part of a larger tensor, nor share it with a different output
            alone = torch.empty_strided(size, stride, dtype=one.dtype, device="meta").untyped_storage()
            if one.storage_offset() or alone.nbytes() != storage.nbytes():
                return None
            storages[storage._cdata] = -1
        elif of < 0:
            return None
        outputs.append(_Made(of, size, stride, int(one.storage_offset()), one.dtype, one.fake_device))
    return _Known(kind, outputs)
