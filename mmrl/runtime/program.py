"""The program of a controller, whoever starts its process: join the others, load, train its part."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

import mmrl
from mmrl.app.trainer import Outcome, Trainer
from mmrl.config.loader import LoadedRecipe
from mmrl.config.schema import Recipe
from mmrl.controller import Controller, preflight
from mmrl.controller.peers import Group
from mmrl.controller.preflight import FirstSum
from mmrl.core.errors import UserError
from mmrl.core.installing import DISTRIBUTION, version_of
from mmrl.core.signals import Stop
from mmrl.inference.this_machine import choose_device
from mmrl.logging.rundir import RunDir
from mmrl.placement.multi_device import MultiDevice
from mmrl.runtime.process_probe import Work
from mmrl.runtime.stall_watchdog import StallWatchdog
from mmrl.training.callbacks import AnyCallback, Callbacks

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


def join(
    recipe: Recipe,
    rank: int,
    device: int,
    store: dist.Store,
    where: tuple[str, int],
    hosts: Mapping[int, str],
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Controller:
    """Controller ``rank``, connected to the others, in the process of its ``device``. Raises ``UnreachedError``.

    All meet in ``store``, which is at the host and port ``where``. ``hosts``: of the ranks.
    """
    before_cuda(recipe)
    devices = recipe.placement.training(recipe.devices_per_controller)
    place, size = rank * devices + device, recipe.controllers * devices
    if device >= devices or size == 1:  # it does not train, or trains alone
        return Controller(recipe.seed, rank, recipe.controllers)
    train = recipe.train
    sizes = sorted({n for n in (train.shard_size, train.width) if n is not None and 1 < n < size})
    seconds = preflight.seconds_of(recipe.runtime.patience)
    first = FirstSum(str(choose_device(recipe.device)), sizes, seconds, hosts)
    peers = Group(place, size, *where, devices, waiting, store, first)
    return Controller(recipe.seed, rank, recipe.controllers, peers)


def train_part(
    loaded: LoadedRecipe,
    whole: RunDir,
    controller: Controller,
    devices: MultiDevice | None,
    pulse: StallWatchdog,
    stop: Stop,
    begun: Callable[[Trainer], None],
    *,
    resume: bool,
    callbacks: Sequence[AnyCallback] = (),
) -> Outcome:
    """Train the controller's part of the run in ``whole``. ``begun`` gets the trainer once everything is loaded."""
    directory = whole.of_controller(controller.rank)
    called = Callbacks(callbacks, loaded.recipe, directory.path, stop) if callbacks else None
    try:
        trainer = Trainer(loaded, directory, controller, whole.checkpoints, devices, pulse, called)
        begun(trainer)
        if devices is not None:
            devices.open(trainer.run)
        return trainer.begin(stop, resume=resume)
    except UserError as error:
        return Outcome(False, 0, 0, 0.0, str(error))


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
    file = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if keep else os.O_TRUNC), 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
