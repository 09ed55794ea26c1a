"""``model.dtype: auto``: bfloat16 where the device has instructions for it, float32 elsewhere.

The choice is made once, when the recipe of a new run is read, and stored in the run's resolved.json. Resuming and all
other commands on the run read it from there, whatever their CPU supports.
"""

# What is private to torch below has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from mmrl.core.json_types import JsonObject, value_at
from mmrl.core.stored import object_if_whole

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

_WITHOUT = {"sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni"}
"""Values of ONEDNN_MAX_CPU_ISA that keep oneDNN from multiplying in bfloat16, whatever the CPU supports."""


def has_bfloat16(device: str) -> bool:
    """Whether the recipe's ``device`` has instructions that multiply bfloat16. Imports torch.

    True for a GPU that is not on this machine.
    """
    import torch

    gpu = torch.cuda.is_available()
    if device == "cpu" or (device == "auto" and not gpu):
        limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
        return torch.backends.mkldnn.is_available() and limit.lower() not in _WITHOUT and _cpu_has_bfloat16()
    if gpu and device.startswith(("auto", "cuda")):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return True


def _cpu_has_bfloat16() -> bool:
    import torch

    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch
        return torch.cpu._is_avx512_bf16_supported()
    has = torch.cpu.get_capabilities()
    return any(has.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))  # the last is ARM's


def choose(device: str) -> tuple[Dtype, str]:
    """The dtype that ``auto`` means on ``device``, and the reason."""
    if has_bfloat16(device):
        return "bfloat16", "because this device has instructions for it"
    return "float32", "because this device has no instructions for bfloat16"


def is_auto(values: JsonObject) -> bool:
    """Whether a recipe, as written, has ``model.dtype: auto``."""
    model = values.get("model")
    return isinstance(model, Mapping) and model.get("dtype") == "auto"


def with_choice(values: JsonObject, dtype: Dtype | None = None) -> JsonObject:
    """``values`` of a recipe with ``dtype`` in place of ``auto``; None chooses by the recipe's device."""
    model = values.get("model")
    if not isinstance(model, Mapping) or not is_auto(values):
        return values
    device = values.get("device", "auto")
    chosen = dtype or choose(device if isinstance(device, str) else "auto")[0]
    return {**values, "model": {**model, "dtype": chosen}}


def chosen_by(run: Path) -> Dtype | None:
    """The dtype of the run in the directory ``run``; None if there is no run, or a damaged one."""
    found: Any = value_at(object_if_whole(run / "resolved.json"), ("model", "dtype"))
    return found if found in get_args(Dtype) and found != "auto" else None
