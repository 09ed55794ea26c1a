"""``torch.compile`` of what predicts, in place: sampling, replay and back-propagation all call the same module."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

import torch
from torch import nn

from mmrl.errors import UserError

_VARIANTS = 64
"""Shapes of a batch times with or without gradient, adapter and guidance. Past it torch would go on without compiling,
and only where that is met."""


def compile_for_all(model: nn.Module, device: torch.device) -> None:
    """Have every call of ``model`` compiled, when it first comes. Raises ``UserError`` where nothing could be.

    Each shape is compiled for itself: with sizes left open, which of several forms a batch meets would depend on what
    came before, and sampling and replay of one batch could meet two.
    """
    _check_tools(device)
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
    model.compile(dynamic=False)


def _check_tools(device: torch.device) -> None:
    if device.type == "cpu":
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            raise UserError(
                f"model.compile: on a CPU torch.compile needs a C++ compiler, and there is no {compiler} here; install "
                "one, name another with the variable CXX, or set model.compile to false"
            )
    elif importlib.util.find_spec("triton") is None:
        raise UserError(
            "model.compile: torch.compile writes kernels for an accelerator with triton, which is not installed; "
            "install it, or set model.compile to false"
        )
