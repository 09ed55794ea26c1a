"""Check whether the device and installed libraries support the section ``performance``, and apply it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from mmrl.config.performance import Performance
from mmrl.config.schema import Recipe
from mmrl.core.installing import install


@dataclass(frozen=True)
class Ability:
    """A device to compute on: ``name`` as the user calls it, ``type`` as torch does. ``ampere``: an NVIDIA GPU of that
    generation or later."""

    name: str
    type: str
    ampere: bool


def ability(device: str) -> Ability:
    """The ability of a device as the recipe names it. One that is not on this machine is taken for one that has
    everything."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device.partition(":")[0]
    if kind != "cuda" or torch.version.hip is not None:
        return Ability(device, kind, ampere=False)
    number = int(device.partition(":")[2] or 0)
    here = number < torch.cuda.device_count()
    return Ability(device, kind, ampere=not here or torch.cuda.get_device_capability(number) >= (8, 0))


def refusals(recipe: Recipe, has: Ability) -> Iterator[str]:
    """What the device or the installed libraries lack, each with the edit that mends it."""
    asked = recipe.performance
    if asked.tf32 and not has.ampere:
        yield (
            f"performance.tf32: {has.name} has no TensorFloat-32, which NVIDIA GPUs have from Ampere on (A100, "
            "RTX 30); remove it"
        )
    if asked.optimizer == "adamw_8bit":
        if has.type not in ("cuda", "cpu", "xpu"):
            yield f"performance.optimizer: bitsandbytes' adamw_8bit does not compute on {has.name}; set it to adamw"
        if find_spec("bitsandbytes") is None:
            yield (
                "performance.optimizer: adamw_8bit is of bitsandbytes, which is not installed here; "
                f"{install('bitsandbytes')}, or set it to adamw"
            )
    yield from _attention(asked.attention, has)


_PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash": ("flash_attn", "flash-attn"),
    "_flash_3": ("flash_attn_interface", "FlashAttention 3, from its sources"),
    "xformers": ("xformers", "xformers"),
}
"""Back ends of attention that need a package: its module, and what to install."""
_EVERYWHERE = ("eager", "sdpa", "native", "_native_math")


def _attention(name: str | None, has: Ability) -> Iterator[str]:
    if name is None or name in _EVERYWHERE:
        return
    if has.type != "cuda":
        yield f"performance.attention: {name} has kernels for CUDA alone, and this device is {has.name}; remove it"
    elif name != "xformers" and name != "_native_efficient" and not has.ampere:
        yield f"performance.attention: {name} needs a GPU of Ampere or later; remove it"
    module, package = _PACKAGES.get(name, ("torch", ""))
    if find_spec(module) is None:
        yield f"performance.attention: {name} is not installed here; install {package}, or remove it"


def page_locking(environment: Mapping[str, str], cores: int) -> str:
    """Torch's settings of how the host's memory is page-locked: its pages are made by several threads. Empty where the
    user has settings of the allocator in ``environment``, which would be replaced."""
    if any(environment.get(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        return ""
    threads = 1 << min(8, cores).bit_length() - 1  # torch takes a power of two, and measured no gain above 8
    return f"pinned_use_cuda_host_register:True,pinned_num_register_threads:{threads}"


def _set_allocator(settings: str) -> None:
    """Torch has no public function for this; where a release has none at all, memory is locked as it always was."""
    inside: Any = import_module("torch._C")
    setter: Any = getattr(inside, "_accelerator_setAllocatorSettings", None)  # from 2.10 on
    setter = setter or getattr(inside, "_cuda_cudaCachingAllocator_set_allocator_settings", None)
    if setter is not None:
        with suppress(RuntimeError):  # a release that does not know them
            setter(settings)


_torch_chose: list[Any] = []
"""What torch computed with before a run of this process changed it: products of matrices, convolutions."""


def settle(asked: Performance, device: torch.device, dtype: str = "float32") -> None:
    """Have this process compute as ``asked`` beside ``dtype``, whatever an earlier run of the process asked for."""
    if device.type != "cuda":
        return
    if torch.version.hip is None and (pinning := page_locking(os.environ, os.cpu_count() or 1)):
        _set_allocator(pinning)
    products: Any = torch.backends.cuda.matmul
    convolutions: Any = torch.backends.cudnn
    tf32 = asked.tf32_beside(dtype)  # a GPU without it computes float32
    if tf32 is None and not _torch_chose:
        return
    if not _torch_chose:
        _torch_chose.extend((products.allow_tf32, convolutions.allow_tf32))
    products.allow_tf32, convolutions.allow_tf32 = _torch_chose if tf32 is None else (tf32, tf32)
