"""The first check of ``gpu_limits.py``: what device and host can do, by the code of ``mmrl doctor --calibrate``."""

from __future__ import annotations

from typing import Any

import torch
from smoke_models import tf32
from smoke_place import Place

from mmrl.planner.calibration import launches, timed


def launch(place: Place) -> dict[str, Any]:
    """Microseconds that the host takes to start an operator, in every check's process, since hosts are shared."""
    return {"us a launch": round(1e6 * launches(place.device).bare, 2)}


def ceiling(place: Place) -> float:
    """TFLOP/s of a bfloat16 product of 8,192 rows and columns."""
    width = 64 if place.small else 8192
    a, b = (torch.randn(width, width, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * width**3 / timed(lambda: a @ b, place.device) / 1e12


def bandwidth(place: Place) -> float:
    """TB/s of a copy, what is read and what is written."""
    source = torch.zeros(2**20 if place.small else 2**32, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source), place.device) / 1e12


def products(place: Place) -> dict[str, Any]:
    """Matrix products of 8,192 rows and columns in bfloat16, TF32 and float32, and a copy of 4 GiB."""
    width, nbytes, digits = (64, 2**20, 6) if place.small else (8192, 2**32, 2)

    def tflops(dtype: torch.dtype) -> float:
        a, b = (torch.randn(width, width, device=place.device, dtype=dtype) for _ in range(2))
        return round(2 * width**3 / timed(lambda: a @ b, place.device) / 1e12, digits)

    figures: dict[str, Any] = {"bfloat16, TFLOP/s": tflops(torch.bfloat16)}
    with tf32(place):
        figures["TF32, TFLOP/s"] = tflops(torch.float32)
    figures["float32, TFLOP/s"] = tflops(torch.float32)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    figures["copy, TB/s"] = round(2 * nbytes / timed(lambda: target.copy_(source), place.device) / 1e12, digits)
    return figures
