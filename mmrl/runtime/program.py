"""What the program of every process of a run sets and says, whoever starts it."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from pathlib import Path

import torch

import mmrl
from mmrl.config.schema import Recipe
from mmrl.core.installing import DISTRIBUTION, version_of
from mmrl.runtime.process_probe import Work
from mmrl.runtime.stall_watchdog import StallWatchdog

PATIENCE = 10.0
"""Seconds without an answer after which a stopped process counts as lost, and the least time after which a phase counts
as stuck. For a process that is not stopped it is ``runtime.patience``."""

_SEEN = 5.0
"""Seconds for a file written on one host to become visible on the others."""


def watchdog(recipe: Recipe) -> StallWatchdog:
    """The watchdog of a process's progress; rewards have their own deadline."""
    rewards = (*recipe.rewards, *recipe.eval.rewards)
    slowest = PATIENCE + max((r.timeout * (r.retries + 1) for r in rewards), default=0.0)
    hidden = ("sample", "reward") if recipe.placement.apart else ()
    return StallWatchdog(PATIENCE, {"reward": slowest, "score": slowest}, hidden, recipe.runtime.patience, Work())


def before_cuda(recipe: Recipe) -> None:
    """Set what CUDA reads once, when it starts."""
    if recipe.train.backend == "megatron":  # collectives and kernels run in the order they were launched
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def versions() -> str:
    """The versions that must be the same on every node; for mmrl also a digest of the sources, for checkouts."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(mmrl.__file__).parent.rglob("*.py")))
    code = hashlib.blake2b(sources, digest_size=4).hexdigest()
    return f"Python {platform.python_version()}, mmrl {version_of(DISTRIBUTION)} ({code}), torch {torch.__version__}"


def sees(mark: str) -> bool:
    """Whether this host sees the file ``mark``, which another host has just written."""
    until = time.monotonic() + _SEEN
    while not (seen := Path(mark).exists()) and time.monotonic() < until:
        time.sleep(0.2)
    return seen


def log_to(path: Path, *, keep: bool) -> None:
    """Redirect this process's output to the file; ``keep``: append to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if keep else os.O_TRUNC), 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
