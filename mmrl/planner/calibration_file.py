"""Keep the calibration of a machine, and find it again: that of the same host, device, release of torch and number of
threads. Such a file may come from somebody else, with a shared home or by hand."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from mmrl.config.dtype import has_bfloat16
from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.stored import Text, read_as
from mmrl.logging.environment import cpu_name
from mmrl.planner.calibration import Calibration, measure
from mmrl.planner.whole_models import with_whole_models

LARGEST = 1 << 20
"""Bytes of a file."""
_READ = 16
"""The most files of other machines that are looked at to say what differs."""
AGAIN = "run mmrl doctor --calibrate (half a minute)"


@dataclass(frozen=True)
class Key:
    """What a calibration holds for."""

    host: Text
    device: Text
    torch: Text
    threads: Annotated[int, Field(ge=0, le=4096, strict=True)]

    @property
    def file(self) -> Path:
        said = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]
        return folder() / f"{said}.json"

    def other_than(self, other: Key) -> str:
        """How this differs from the ``other``."""
        mine, theirs = asdict(self), asdict(other)
        return ", ".join(
            f"{name} {theirs[name]} instead of {mine[name]}" for name in mine if mine[name] != theirs[name]
        )


@dataclass(frozen=True)
class Kept:
    """The content of a file."""

    key: Key
    calibration: Calibration


def folder() -> Path:
    """The folder of the user's cache that holds calibrations."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmrl" / "calibrations"


def key_of(device: str, threads: int | None = None) -> Key:
    """That of this machine's ``device``; ``threads`` of torch on a CPU, None: as many as it would take now."""
    if device.startswith("cuda"):
        return Key(platform.node(), torch.cuda.get_device_name(torch.device(device)), torch.__version__, 0)
    return Key(platform.node(), cpu_name(), torch.__version__, threads or torch.get_num_threads())


def keep(key: Key, calibration: Calibration) -> Path:
    """Write a calibration; returns its file."""
    key.file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(key.file, json.dumps(asdict(Kept(key, calibration)), indent=1))
    return key.file


def find(key: Key, dtype: str) -> tuple[Calibration | None, str]:
    """The calibration for ``key`` that has ``dtype``, or None and why there is none, with what to do."""
    try:
        kept = read_as(Kept, key.file, LARGEST)
    except FileNotFoundError:
        return None, _others(key)
    except UserError as error:
        return None, f"the calibration is not used: {error}; {AGAIN}"
    if wrong := _lacking(kept.calibration):
        return None, f"the calibration is not used: {key.file} {wrong}; {AGAIN}"
    if kept.key != key:
        return None, f"the calibration in {key.file} is of {key.other_than(kept.key)} and is not used; {AGAIN}"
    if dtype not in kept.calibration.dtypes:
        return (
            None,
            f"the calibration has no {dtype}, which this device lacks, and is not used; set model.dtype=float32",
        )
    return kept.calibration, ""


def calibrated() -> str:
    """Measure the device that ``device: auto`` takes and keep the result in the user's cache; returns what to print."""
    device, began = "cuda" if torch.cuda.is_available() else "cpu", time.perf_counter()
    made = measure(device, [torch.float32, *([torch.bfloat16] if has_bfloat16(device) else [])])
    made = with_whole_models(made, device)
    key = key_of(device)
    threads = f", {key.threads} thread{'s' * (key.threads > 1)}" if device == "cpu" else ""
    lines = [f"{made.device}{threads}, torch {key.torch}, in {time.perf_counter() - began:.0f} s"]
    for dtype in made.dtypes:
        best = max((t.work / t.seconds for t in made.timings if (t.kind, t.dtype) == ("product", dtype)), default=0.0)
        lines.append(f"products, {dtype}: {best / 1e9:,.0f} GFLOP/s")
    moved = max((t.work, t.work / t.seconds) for t in made.timings if t.kind == "add")[1]
    lines.append(f"bandwidth: {moved / 1e9:,.1f} GB/s; to start an operator: {1e6 * made.launches.forward:.1f} us")
    return "\n".join([*lines, f"kept in {keep(key, made)}"])


_NEEDED = {
    "product": 4,
    "attention": 4,
    "attention_backward": 4,
    "convolution": 2,
    "convolution_backward": 2,
    "add": 0,
}
"""What an estimate reads, and how many sizes each has; all others have none."""


def _lacking(found: Calibration) -> str:
    """What a calibration lacks that an estimate reads; empty where it has all."""
    for dtype in {"float32", *found.dtypes} & {"float32", "bfloat16", "float16"}:
        measured = {one.kind for one in found.timings if one.dtype == dtype}
        if missing := sorted(set(_NEEDED) - measured):
            return f"has no {missing[0]} in {dtype}"
    wrong = next((one.kind for one in found.timings if len(one.sizes) != _NEEDED.get(one.kind, 0)), None)
    return "" if wrong is None else f"has a {wrong} of another number of sizes"


def _others(key: Key) -> str:
    for file in sorted(folder().glob("*.json"))[:_READ] if folder().is_dir() else ():
        try:
            other = read_as(Kept, file, LARGEST).key
        except (UserError, FileNotFoundError):
            continue
        return f"not calibrated: there is a calibration with {key.other_than(other)}; {AGAIN}"
    return f"not calibrated: {AGAIN}"
