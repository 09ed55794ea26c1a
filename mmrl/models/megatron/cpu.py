"""Let Megatron-Core 0.16 run without CUDA: the name ``torch`` in its modules refers to CPU replacements.

It asks ``torch.cuda`` for devices, streams and random states, and makes tensors on ``"cuda"`` by name. Here the global
``torch`` of its loaded modules is replaced by a module that answers for the CPU. No file of the library is changed, and
with CUDA nothing is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

P = ParamSpec("P")
T = TypeVar("T")
_CPU = torch.device("cpu")
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like"),
    *("rand", "randint", "randn", "tensor", "zeros", "zeros_like"),
)


def install() -> None:
    """Make every loaded module of Megatron-Core use the CPU; call it again after more of them were loaded."""
    if torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel import random  # pyright: ignore[reportMissingImports]  # an extra
    from megatron.core.transformer.moe import token_dispatcher  # pyright: ignore[reportMissingImports]

    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = _torch
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = _numbers
    # its generator for the GPU is the CPU's here, so that the state of the CPU's generator is meant to change
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _numbers(tensor: T, as_numpy: bool = False, record_stream: bool = False) -> T | np.ndarray:
    """Megatron-Core's function of this place, which does not convert tensors on the CPU; gloo takes no tensors for
    sizes."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _Nothing:
    """Final class: a stream or event of a device without these; all of its methods do nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _Nothing]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: _Nothing()


class _InPlaceOf(types.ModuleType):
    """Final class: the ``module``, with ``others`` in place of some of its names."""

    def __init__(self, module: types.ModuleType, **others: object) -> None:
        super().__init__(module.__name__)
        vars(self).update(others, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_cuda = _InPlaceOf(
    torch.cuda,
    Stream=_Nothing,
    Event=_Nothing,
    current_device=lambda: _CPU,
    current_stream=lambda *_, **__: _Nothing(),
    default_stream=lambda *_, **__: _Nothing(),
    device_count=lambda: 1,
    empty_cache=lambda: None,
    get_rng_state=lambda *_, **__: torch.get_rng_state(),
    is_available=lambda: False,
    manual_seed=torch.manual_seed,
    set_device=lambda *_: None,
    set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    stream=lambda *_, **__: contextlib.nullcontext(),
    synchronize=lambda *_, **__: None,
)


def _here(factory: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> T:
        device = kwargs.get("device")
        if isinstance(device, int) or (isinstance(device, str | torch.device) and torch.device(device).type == "cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


_torch = _InPlaceOf(torch, cuda=_cuda, **{name: _here(getattr(torch, name)) for name in _FACTORIES})
