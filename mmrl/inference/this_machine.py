"""What this machine lacks for a recipe: its device, its folder of features, its engine, its trackers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.inference.picture_server import python_of
from mmrl.inference.sglang import check_url, require_sglang
from mmrl.inference.vllm_api import require_vllm
from mmrl.logging.trackers import check_trackers


def choose_device(name: str) -> torch.device:
    """``auto`` takes an accelerator where torch sees one. Raises ``UserError`` for one that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"device: {name!r} is not to be had here ({reason}); use device=auto or device=cpu, or plan for another "
            "machine with mmrl plan --gpu h100-80g"
        ) from error
    return device


def check_features(recipe: Recipe) -> None:
    """Raise ``UserError`` where the folder for features is not there."""
    if recipe.features.folder and not Path(recipe.features.folder).is_dir():
        raise UserError(f"features.folder: {recipe.features.folder} is no folder here; make it, or name a local one")


def check_engine(recipe: Recipe) -> None:
    """Raise ``UserError`` where the engine that samples is not installed, or its server's address is refused."""
    engine, url, python = recipe.rollout.engine, recipe.rollout.options.get("url"), python_of(recipe.rollout.options)
    if engine == "sglang" and url is not None:
        check_url(str(url))
    elif engine == "sglang" and python is not None and recipe.sampling.type == "diffusion":
        if not (python.is_file() and os.access(python, os.X_OK)):
            raise UserError(
                f"rollout.options.python: {python} is no program here; give the python of the environment that has "
                "SGLang (docs/engines.md says how to make one)"
            )
    elif engine == "sglang":
        require_sglang()
    elif engine in ("vllm", "vllm_server"):
        require_vllm()


def refusals(recipe: Recipe) -> Iterator[str]:
    """Everything but its device that training would refuse on this machine, each with the edit that mends it."""
    checks: list[Callable[[], object]] = [
        lambda: check_features(recipe),
        lambda: check_engine(recipe),
        lambda: check_trackers(recipe.log),
    ]
    for check in checks:
        try:
            check()
        except UserError as error:
            yield str(error)
