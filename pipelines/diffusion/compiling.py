"""``torch.compile`` of the predicting modules, in place: sampling, replay and back-propagation share them.

Its repeated blocks are compiled, and not the model around them: blocks of one kind share what was compiled for the
first, so that it takes no longer for many of them than for a few.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from mmrl.errors import UserError

_VARIANTS = 64
"""Kinds of blocks times shapes of a batch of one size times with or without gradient and adapter. Past it torch would
go on without compiling, and only where that is met."""


def compile_for_all(model: nn.Module, device: torch.device, *, sizes: int = 1) -> None:
    """Have every call of the blocks of ``model`` compiled, when it first comes; pictures are of so many ``sizes``.
    Raises ``UserError`` where nothing could be.

    Each shape is compiled for itself: with sizes left open, which of several forms a batch meets would depend on what
    came before, and sampling and replay of one batch could meet two.
    """
    _check_tools(device)
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS * sizes)
    for block in repeated(model):
        block.compile(dynamic=False)  # in place: no name of a weight changes


def repeated(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks that ``model`` consists of: those that diffusers names, or where it names none (SD3, Sana) what the
    model has several of in a list of its own. Of a model without any it is the model."""
    named = getattr(model, "_repeated_blocks", None)
    if not named:
        lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
        kinds = Counter(type(block).__name__ for blocks in lists for block in blocks)
        named = [kind for kind, times in kinds.items() if times > 1]
    found = [module for module in model.modules() if type(module).__name__ in named]
    yield from found or [model]


def _check_tools(device: torch.device) -> None:
    if device.type == "cpu":
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            raise UserError(
                f"performance.compile: on a CPU torch.compile needs a C++ compiler, and there is no {compiler} here; "
                "install one, name another with the variable CXX, or set performance.compile to false"
            )
    elif importlib.util.find_spec("triton") is None:
        raise UserError(
            "performance.compile: torch.compile writes kernels for an accelerator with triton, which is not installed; "
            "install it, or set performance.compile to false"
        )
