"""Calls of environments beside sampling: in threads, with a limit of time for each."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from mmrl.core.plugins.user_code import describe

K = TypeVar("K")


@dataclass(frozen=True)
class Returned:
    """What a call returned, or why it failed, and the ``seconds`` that it took in a ``Pool``."""

    value: Any
    error: str
    seconds: float = field(default=0.0, compare=False)


class Pool(Generic[K]):
    """Final class. At most ``workers`` calls at once, each at most ``timeout`` seconds; every call has a key.

    A call that takes longer has failed. Its thread cannot be ended; it no longer counts as a worker.
    """

    def __init__(self, workers: int, timeout: float) -> None:
        self._workers, self._timeout = workers, timeout
        self._waiting: deque[tuple[K, Callable[[], Any]]] = deque()
        self._under_way: dict[K, float] = {}
        self._returned: queue.SimpleQueue[tuple[K, float, Returned]] = queue.SimpleQueue()

    def __bool__(self) -> bool:
        """Whether answers are to come."""
        return bool(self._waiting or self._under_way)

    def submit(self, key: K, call: Callable[[], Any]) -> None:
        self._waiting.append((key, call))
        self._start()

    def ready(self, *, wait: bool) -> list[tuple[K, Returned]]:
        """What has returned or failed since the last call; ``wait``: for the first one."""
        found: list[tuple[K, Returned]] = []
        while True:
            try:
                left = min(self._under_way.values(), default=0.0) + self._timeout - time.monotonic()
                block = wait and not found and bool(self._under_way)
                key, began, returned = self._returned.get(block, max(0.0, left) if block else None)
                if self._under_way.get(key) == began:  # else it came too late
                    del self._under_way[key]
                    found.append((key, returned))
            except queue.Empty:
                found += self._late()
                self._start()
                if found or not wait or not self._under_way:
                    return found

    def _late(self) -> list[tuple[K, Returned]]:
        now = time.monotonic()
        late = [key for key, began in self._under_way.items() if now - began >= self._timeout]
        why = f"the call did not return within {self._timeout:g} s (environment.timeout)"
        for key in late:
            del self._under_way[key]
        return [(key, Returned(None, why, self._timeout)) for key in late]

    def _start(self) -> None:
        while self._waiting and len(self._under_way) < self._workers:
            key, call = self._waiting.popleft()
            self._under_way[key] = began = time.monotonic()
            threading.Thread(target=self._run, args=(key, began, call), daemon=True).start()

    def _run(self, key: K, began: float, call: Callable[[], Any]) -> None:
        returned = returned_by(call)
        self._returned.put((key, began, replace(returned, seconds=time.monotonic() - began)))


def returned_within(seconds: float, call: Callable[[], Any]) -> Returned:
    """What the ``call`` returned, or why it failed: also that it did not return within so many seconds."""
    pool: Pool[None] = Pool(1, seconds)
    pool.submit(None, call)
    ((_, returned),) = pool.ready(wait=True)
    return returned


def returned_by(call: Callable[[], Any]) -> Returned:
    """Make the call, which may be ``async``, and may return a ``Returned``."""
    try:
        value = call()
        value = asyncio.run(awaited(value)) if inspect.isawaitable(value) else value
        return value if isinstance(value, Returned) else Returned(value, "")
    except BaseException as error:  # of anybody's code
        return Returned(None, describe(error))


async def awaited(value: Any) -> Any:
    """``value``, or what it will be."""
    return await value if inspect.isawaitable(value) else value
