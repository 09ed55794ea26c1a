"""Measure the wall time of a step by phase, and its peak memory."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class Clock:
    """``with clock("sample"):`` adds to that phase; this thread's stream is waited for, so that times are true.

    ``pulse(phase)`` is entered with it: whoever watches whether the run gets on (``mmrl.runtime.stall_watchdog``).
    """

    def __init__(
        self, device: torch.device, pulse: Callable[[str], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._device, self._pulse = device, pulse
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        started = self._now()
        try:
            with self._pulse(phase):
                yield
        finally:
            self._seconds[phase] += self._now() - started

    def row(self) -> dict[str, float]:
        """``time/<phase>`` in seconds."""
        return {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # rewards have streams of their own
        return time.perf_counter()


def memory(device: torch.device) -> dict[str, float]:
    """Peak memory so far in MiB, of the accelerator, or without one of the process."""
    if device.type == "cuda":
        return {"perf/peak_memory_mib": torch.cuda.max_memory_allocated(device) / 2**20}
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"perf/peak_memory_mib": peak / (2**20 if sys.platform == "darwin" else 2**10)}
