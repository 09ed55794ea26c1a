"""vLLM's sleep mode: what an engine keeps while its device does other work, and the order of waking."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

WEIGHTS, CACHE = "weights", "kv_cache"
"""The parts of an engine's memory, by vLLM's names."""


class SleepMode:
    """Final class. ``sleep`` takes vLLM's level and ``wake`` the parts to bring back.

    Where every update replaces all weights they are dropped (level 2). Where updates bring an adapter alone
    (``keep_weights``), the weights wait in the host's memory (level 1). The key-value cache is dropped in both. Its
    memory comes back after the new weights, so that the old copy, the new one and the cache are never there together.
    """

    def __init__(
        self, sleep: Callable[[int], Any], wake: Callable[[Sequence[str]], Any], *, keep_weights: bool
    ) -> None:
        self._level = 1 if keep_weights else 2
        self._sleep, self._wake = sleep, wake
        self._asleep: list[str] = []
        self._dropped = False
        """The weights' memory holds no weights."""

    def sleep(self) -> None:
        """Free the device's memory. Harmless when called twice."""
        if WEIGHTS not in self._asleep:
            self._sleep(self._level)
            self._asleep, self._dropped = [WEIGHTS, CACHE], self._level == 2

    def wake(self) -> None:
        """Have memory for the weights; those that were kept are in it. Harmless where nothing sleeps."""
        self._back(WEIGHTS)

    @contextmanager
    def filled(self) -> Generator[None]:
        """Inside, new weights come; the cache comes after them."""
        self._back(WEIGHTS)
        yield
        self._dropped = False
        self._back(CACHE)

    def ready(self) -> None:
        """Have all of it there, to sample."""
        if self._dropped:
            raise RuntimeError("the engine's weights were dropped when it went to sleep: update it before it samples")
        self._back(WEIGHTS)
        self._back(CACHE)

    def _back(self, part: str) -> None:
        if part in self._asleep:
            self._wake([part])
            self._asleep.remove(part)
