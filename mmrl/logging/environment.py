"""The machine and versions of a run: enough to repeat it, without the owner's name."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from mmrl.core.installing import DISTRIBUTION, version_of
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.stored import read_as

PACKAGES = {
    "mmrl": DISTRIBUTION,
    **{
        name: name
        for name in (
            "torch",
            "transformers",
            "diffusers",
            "accelerate",
            "peft",
            "safetensors",
            "numpy",
            "pillow",
            "pydantic",
        )
    },
}
"""Names in env.json, and the distributions whose versions they tell."""


class _Environment(BaseModel):
    """The schema of ``env.json``; older versions wrote fewer of the keys."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    python: str | None = None
    platform: str | None = None
    cpu: dict[str, str | int | float | None] = {}
    devices: list[dict[str, str | int | float | None]] = []
    versions: dict[str, str] = {}
    threads: dict[str, str | int] = {}
    git: dict[str, str | bool] | None = None


def read_environment(path: Path) -> dict[str, Any]:
    """What ``env.json`` holds of the machine and the versions of a run. Raises ``FileNotFoundError``, and
    ``UserError`` where it is not as mmrl writes it."""
    return read_as(_Environment, path).model_dump(exclude_unset=True)


def environment() -> dict[str, Json]:
    """Versions, platform, processors, devices and the commit of this checkout. Imports torch; holds no paths."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()} {platform.release()}",
        "cpu": {
            "name": cpu_name(),
            "count": os.cpu_count(),
            "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": _memory_gib(),
        },
        "devices": _devices(),
        "versions": {name: v for name, package in PACKAGES.items() if (v := version_of(package)) is not None},
        "threads": {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ},
        "git": _commit(Path(__file__).resolve().parents[2]),
    }


def cpu_name() -> str:
    """The processor's name, as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory_gib() -> float:
    import psutil

    return round(psutil.virtual_memory().total / 2**30, 1)


def _devices() -> list[JsonObject]:
    import torch

    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [{"name": p.name, "memory_gib": round(p.total_memory / 2**30, 1)} for p in found]
    if sys.platform == "darwin" and torch.backends.mps.is_available():
        return [{"name": "Apple GPU (mps)"}]
    return []


def _commit(root: Path) -> JsonObject | None:
    """The commit of the checkout that mmrl runs from. None in a wheel, even one installed inside a repository."""
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain"))} if commit else None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
