"""Plans, and what a step takes, counted as it runs: shared by the tests that hold one against the other."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.planner.fake_tensors import LiveBytes, nbytes
from mmrl.planner.plan import plan
from mmrl.planner.plan_data import Plan
from mmrl.training.loop import train_step

LEFT_OUT = "the step is left out"


def planned(name: str, *overrides: str, device_memory: int | None = None) -> Plan:
    """The plan of a recipe. It is made once in a process, so the files that the recipe names must not change; each
    caller has a copy."""
    return deepcopy(_planned(name, overrides, device_memory))


@cache
def _planned(name: str, overrides: tuple[str, ...], device_memory: int | None) -> Plan:
    return plan(load_recipe([name], overrides), device_memory)


@contextmanager
def without_the_step() -> Iterator[list]:
    """Inside the block, a plan ends before its step is run without data, which takes most of its time.

    ``LEFT_OUT`` is then among the plan's problems. Yields what the step was given.
    """
    given: list = []

    def stopped(*arguments, **named):
        given.extend((*arguments, *named.values()))
        raise UserError(LEFT_OUT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmrl.planner.plan.measure", stopped)
        yield given


def planned_in_short(name: str, *overrides: str, device_memory: int | None = None) -> Plan:
    """The plan of a recipe without its step: what is read, built, checked and counted before."""
    with without_the_step():
        return plan(load_recipe([name], overrides), device_memory)


def run_steps(loaded, steps=1):
    """Bytes of the weights and copies, and the highest bytes of everything else while ``steps`` real steps run."""
    run = build(loaded.recipe)
    adapter = run.pipeline.adapter
    modules = [run.policy.module, adapter.vae, *adapter.text_encoders]
    for module in modules:  # safetensors maps a file: bring all of it into memory, as an accelerator would
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.data = tensor.data.clone()
    held = nbytes(t for m in modules for t in [*m.parameters(), *m.buffers()])
    held += nbytes(t for copy in run.policy.copies.values() for t in copy.values())
    gc.collect()
    with LiveBytes() as live, PeakRss() as rss:
        for step in range(steps):
            train_step(run, step, Clock(torch.device("cpu")))
    return {"held": held, "peak": live.peak, "features": run.pipeline.features.bytes, "rss": rss.peak}


class PeakRss:
    """The largest resident memory of this process inside the block, in bytes, looked at every 5 ms."""

    def __enter__(self):
        self.peak, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()

    def _watch(self):
        while not self._done.wait(0.005):
            self.peak = max(self.peak, resident())


def resident():
    """Bytes of memory of the process's own: what is mapped from files (weights as they were read) is the system's."""
    import psutil

    status = Path("/proc/self/status")
    if not status.exists():
        return psutil.Process().memory_info().rss
    return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("RssAnon"))


def random_weights(module):
    """Real, small random weights in the place of those on the meta device."""
    module.to_empty(device="cpu")
    if hasattr(module, "tie_weights"):
        module.tie_weights()  # T5's two names for its embedding
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.normal_(std=0.02)
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.abs_()
    return module
