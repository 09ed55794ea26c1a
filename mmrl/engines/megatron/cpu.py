"""Let Megatron-Core 0.16 run without CUDA: the name ``torch`` in its modules refers to CPU replacements.

It asks ``torch.cuda`` for devices, streams and random states, and makes tensors on ``"cuda"`` by name. Here the global
``torch`` of the modules that are loaded is exchanged for a stand-in that answers for the CPU. No file of the library is
touched, and where CUDA is there nothing is exchanged.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like"),
    *("rand", "randint", "randn", "tensor", "zeros", "zeros_like"),
)


def install() -> None:
    """Lead every module of Megatron-Core that is loaded to the CPU; again after more of them were loaded."""
    if torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel import random  # pyright: ignore[reportMissingImports]  # an extra
    from megatron.core.transformer.moe import token_dispatcher  # pyright: ignore[reportMissingImports]

    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = _torch
    own: Any = random
    own._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    own._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = _numbers
    # the generator that it keeps for the GPU is the CPU's own here, so what it warns of is meant
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """As Megatron-Core has it, which leaves tensors that are on the CPU; gloo takes no tensor for sizes."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _Nothing:
    """Final class: a stream or an event of a device that has none; every call of it does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: _Nothing()


class _Cuda(types.ModuleType):
    """Final class: stands where ``torch.cuda`` does."""

    Stream = Event = _Nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _cuda() -> _Cuda:
    module = _Cuda("torch.cuda")
    vars(module).update(
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
    return module


class _Torch(types.ModuleType):
    """Final class: ``torch``, whose ``cuda`` is the stand-in and whose factories make nothing on CUDA."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _here(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if isinstance(device, int) or (device is not None and torch.device(device).type == "cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


_torch = _Torch("torch")
vars(_torch).update({"cuda": _cuda()} | {name: _here(getattr(torch, name)) for name in _FACTORIES})
