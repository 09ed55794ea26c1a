"""vLLM's sleep mode: what an engine keeps while its device does other work, and the order in which it wakes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

WEIGHTS, CACHE = "weights", "kv_cache"
"""The parts of an engine's memory, by vLLM's names."""


class SleepMode:
    """Final class. ``sleep`` is called with vLLM's level, ``wake`` with the parts to allocate again.

    If every update replaces all weights, they are dropped (level 2). If updates replace only an adapter
    (``keep_weights``), the weights are moved to the host's memory (level 1). The key-value cache is dropped in both. It
    is allocated after the new weights came, so that old weights, new weights and cache never take memory together.
    """

    def __init__(
        self, sleep: Callable[[int], object], wake: Callable[[Sequence[str]], object], *, keep_weights: bool
    ) -> None:
        self._level = 1 if keep_weights else 2
        self._sleep, self._wake = sleep, wake
        self._asleep: list[str] = []
        self._dropped = False
        """Whether the weights were dropped, and no update came since."""

    def sleep(self) -> None:
        """Free the device's memory. Harmless when called twice."""
        if WEIGHTS not in self._asleep:
            self._sleep(self._level)
            self._asleep, self._dropped = [WEIGHTS, CACHE], self._level == 2

    def wake(self) -> None:
        """Allocate the weights' memory, with the weights if they were kept. Harmless when nothing sleeps."""
        self._back(WEIGHTS)

    @contextmanager
    def filled(self) -> Generator[None]:
        """A context in which new weights are loaded; the cache is allocated after it."""
        self._back(WEIGHTS)
        yield
        self._dropped = False
        self._back(CACHE)

    def ready(self) -> None:
        """Allocate everything that sampling needs."""
        if self._dropped:
            raise RuntimeError("the engine's weights were dropped when it went to sleep: update it before it samples")
        self._back(WEIGHTS)
        self._back(CACHE)

    def _back(self, part: str) -> None:
        if part in self._asleep:
            self._wake([part])
            self._asleep.remove(part)
