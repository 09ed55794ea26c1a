"""A table of GPUs for plans: memory, peak rates of arithmetic and memory bandwidth.

``memory`` is what torch reports for such a GPU (``total_memory``), a few per cent less than the name says. Rates are
the vendor's peaks without sparsity: ``half`` for bfloat16 (float16 if the GPU has no bfloat16) with float32
accumulation, ``single`` for float32 without TF32. If a GPU has several forms, the SXM module is listed.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from mmrl.config.dtype import with_choice
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject


@dataclass(frozen=True)
class Gpu:
    """Memory in GiB, rates in TFLOP/s, ``bandwidth`` in GB/s; ``source``: the vendor's document with the rates."""

    name: str
    gib: float
    half: float
    single: float
    bandwidth: float
    source: str
    bfloat16: bool = True
    ampere: bool = True
    """Whether it is NVIDIA's Ampere generation or later, with TensorFloat-32 and the kernels written for it."""

    @property
    def memory(self) -> int:
        """Bytes."""
        return int(self.gib * 2**30)

    def rate(self, dtype: str) -> float:
        """Peak operations per second in ``dtype``; ``tf32`` is half of half precision, where there is any."""
        half = dtype == "float16" or (dtype == "bfloat16" and self.bfloat16)
        tf32 = dtype == "tf32" and self.ampere
        return 1e12 * (self.half if half else max(self.single, self.half / 2 if tf32 else 0))


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40g", 39.4, 312, 19.5, 1555, "NVIDIA A100 data sheet"),
        Gpu("a100-80g", 79.1, 312, 19.5, 2039, "NVIDIA A100 data sheet"),
        Gpu("a40-48g", 44.3, 149.7, 37.4, 696, "NVIDIA A40 data sheet"),
        Gpu("b200-180g", 178.3, 2250, 80, 7700, "NVIDIA Blackwell data sheet (HGX B200)"),
        Gpu("h100-80g", 79.1, 989, 67, 3350, "NVIDIA H100 data sheet"),
        Gpu("h200-141g", 139.8, 989, 67, 4800, "NVIDIA H200 data sheet"),
        Gpu("l4-24g", 22.0, 121, 30.3, 300, "NVIDIA L4 data sheet"),
        Gpu("l40s-48g", 44.3, 362, 91.6, 864, "NVIDIA L40S data sheet"),
        Gpu("mi300x-192g", 191.6, 1307.4, 163.4, 5300, "AMD Instinct MI300X data sheet", ampere=False),
        Gpu("rtx3060-12g", 11.8, 25.3, 12.7, 360, "NVIDIA GeForce RTX 3060 page (a quarter of its tensor TFLOPS)"),
        Gpu("rtx3070-8g", 7.8, 40.6, 20.3, 448, "NVIDIA Ampere GA102 white paper"),
        Gpu("rtx3080-10g", 9.8, 59.5, 29.8, 760, "NVIDIA Ampere GA102 white paper"),
        Gpu("rtx3090-24g", 23.5, 71, 35.6, 936, "NVIDIA Ampere GA102 white paper"),
        Gpu("rtx4060ti-16g", 15.6, 44.1, 22.1, 288, "NVIDIA GeForce RTX 4060 Ti page (an eighth of its AI TOPS)"),
        Gpu("rtx4070-12g", 11.7, 58.3, 29.1, 504, "NVIDIA GeForce RTX 4070 page (an eighth of its AI TOPS)"),
        Gpu("rtx4080-16g", 15.7, 97.5, 48.7, 717, "NVIDIA Ada white paper"),
        Gpu("rtx4090-24g", 23.5, 165.2, 82.6, 1008, "NVIDIA Ada white paper"),
        Gpu("rtx5070-12g", 11.5, 61.7, 30.9, 672, "NVIDIA RTX Blackwell white paper"),
        Gpu("rtx5080-16g", 15.5, 112.6, 56.3, 960, "NVIDIA RTX Blackwell white paper"),
        Gpu("rtx5090-32g", 31.3, 209.5, 104.8, 1792, "NVIDIA RTX Blackwell white paper"),
        Gpu("t4-16g", 14.7, 65, 8.1, 320, "NVIDIA T4 data sheet", bfloat16=False, ampere=False),
        Gpu("v100-32g", 31.7, 125, 15.7, 900, "NVIDIA V100 data sheet", bfloat16=False, ampere=False),
    )
}


def gpu_of(name: str) -> Gpu:
    """The GPU ``name``. Raises ``UserError`` that names the known ones."""
    found = GPUS.get(name.lower())
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), GPUS, 1, 0.5)
    edit = f"write --gpu {near[0]}, or one of" if near else "write one of"
    raise UserError(f"--gpu {name}: this GPU is not in the table; {edit} {', '.join(GPUS)}")


def like(device_name: str, memory: int) -> Gpu | None:
    """The GPU that torch calls ``device_name``, of those of its kind the one whose memory is nearest; None where it is
    not in the table."""
    said = "".join(device_name.lower().split())
    kinds = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in said]
    longest = max((len(gpu.name.partition("-")[0]) for gpu in kinds), default=0)  # an L40S is no L4
    return min(
        (gpu for gpu in kinds if len(gpu.name.partition("-")[0]) == longest),
        key=lambda gpu: abs(gpu.memory - memory),
        default=None,
    )


def cpu(cores: int) -> Gpu:
    """A CPU of ``cores`` as the estimate of time reads it: rates that few CPUs reach, so that it is at least that."""
    rate = 0.1 * cores
    return Gpu("this CPU", 0, rate, rate, 50, "a rate of 100 GFLOP/s a core")


def planned_for(gpu: Gpu, values: JsonObject) -> JsonObject:
    """``values`` of a recipe for a plan on ``gpu``: with its device, and its dtype for ``model.dtype: auto``."""
    return with_choice({**values, "device": "cuda"}, "bfloat16" if gpu.bfloat16 else "float32")
