"""Measure how busy a GPU is: NVML's utilisation, read regularly in a thread."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from functools import cache

import torch

EVERY_S = 0.2
"""Seconds between two readings; the GPU averages over its last 1/6 to 1 second."""


class Sampler:
    """Final class. Calls ``read`` every ``EVERY_S`` seconds, in a daemon thread, until ``close``."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._sum, self._count = 0.0, 0
        self._lock, self._closed = threading.Lock(), threading.Event()
        threading.Thread(target=self._run, name="mmrl-utilisation", daemon=True).start()

    def mean(self) -> float | None:
        """The mean of the readings since the last call; None if there was none."""
        with self._lock:
            found = self._sum / self._count if self._count else None
            self._sum, self._count = 0.0, 0
        return found

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(EVERY_S):
            try:
                now = self._read()
            except Exception:  # no figure; the run goes on
                continue
            with self._lock:
                self._sum, self._count = self._sum + now, self._count + 1


def of_gpu(device: torch.device) -> float | None:
    """Mean share (0 to 1) of the time since the last call in which the GPU ``device`` was busy, for any process. None
    if it is not a GPU, without the package nvidia-ml-py, and at the first call."""
    sampler = _sampler(device)
    return None if sampler is None else sampler.mean()


@cache
def _sampler(device: torch.device) -> Sampler | None:
    """That of the process; it is made once."""
    if device.type != "cuda" or importlib.util.find_spec("pynvml") is None:
        return None
    try:
        torch.cuda.utilization(device)
    except Exception:  # no driver, or none of this reading (MIG, vGPU): NVML's errors have no class that torch names
        return None
    return Sampler(lambda: torch.cuda.utilization(device) / 100)
