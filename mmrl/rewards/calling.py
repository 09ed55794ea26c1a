"""Call a reward on batches of samples: a deadline, retries, and an answer that is checked. Imports no torch.

A reward runs in a thread of its own (an async one in an event loop there). A thread that does not come back in time is
given up, never waited for: it is a daemon, so the process can end, and the next batch gets a fresh one.
"""

from __future__ import annotations

import asyncio
import math
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from mmrl.errors import UserError
from mmrl.rewards.contract import Context, Failed
from mmrl.rewards.loading import Loaded, describe, place_of
from mmrl.trajectory import Sample

NAN = float("nan")
BACKOFF_S = 0.5
"""Seconds before the first retry; doubled for each further one, up to ``MAX_BACKOFF_S``."""
MAX_BACKOFF_S = 30.0
CONCURRENT_BATCHES = 64
"""Batches of an async reward that are under way at once."""
_GRACE_S = 1.0


class BatchError(Exception):
    """A call brought no usable answer for any of its samples. ``mend`` is the edit that helps."""

    def __init__(self, reason: str, mend: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.mend = mend


@dataclass(frozen=True)
class Answer:
    """What a reward said of ``n`` samples.

    ``total``: ``n`` numbers, NaN where a sample failed; ``reasons``: why, None where it did not. ``parts``: ``n``
    numbers per named part, NaN where it says nothing of a sample. ``error``: set when the whole call failed.
    """

    total: list[float]
    reasons: list[str | None]
    parts: dict[str, list[float]] = field(default_factory=dict)
    error: BatchError | None = None


def read_answer(returned: Any, n: int, place: str) -> Answer:
    """Check what a reward returned for ``n`` samples. Raises ``BatchError`` when it is not one value per sample."""
    if not isinstance(returned, Mapping):
        return Answer(*_numbers(returned, n, "", place))
    if not returned:
        raise BatchError("returned an empty dict", f"return at least one named part from {place}")
    read = {str(name): _numbers(values, n, f" for the part {name!r}", place) for name, values in returned.items()}
    parts = {name: numbers for name, (numbers, _) in read.items()}
    if "score" in parts:
        total, reasons = read["score"]
        return Answer(total, reasons, {k: v for k, v in parts.items() if k != "score"})
    total = [math.fsum(row) / len(row) for row in zip(*parts.values(), strict=True)]
    reasons = [
        next((f"part {name!r} {why[i]}" for name, (_, why) in read.items() if why[i] is not None), None)
        for i in range(n)
    ]
    return Answer(total, reasons, parts)


class Caller:
    """Calls one reward. ``timeout`` is in seconds for one batch; a failed batch is tried ``retries`` times more.

    Thread-safe; calls of a sync reward run one after another, those of an async one concurrently.
    """

    def __init__(self, reward: Loaded, timeout: float, retries: int = 0) -> None:
        self.reward, self.timeout, self.retries = reward, timeout, retries
        self._lane: _Lane | None = None
        self._swap = threading.Lock()
        self._turn = threading.Lock()

    def one(self, samples: Sequence[Sample], context: Context) -> Answer:
        """The answer for one batch. Never raises for what the reward did: see ``Answer.error``."""
        error = BatchError("was not called", "")
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(BACKOFF_S * 2 ** (attempt - 1), MAX_BACKOFF_S))
            try:
                return read_answer(self._attempt(list(samples), context), len(samples), self.reward.place)
            except BatchError as failure:
                error = failure
        if self.retries:
            error = BatchError(f"{error.reason} (after {self.retries + 1} attempts)", error.mend)
        return Answer([NAN] * len(samples), [error.reason] * len(samples), error=error)

    def many(self, batches: Sequence[Sequence[Sample]], context: Context) -> Iterator[Answer]:
        """The answers for ``batches``, in order: a sync reward is asked as they are read, an async one at once."""
        if not self.reward.is_async or len(batches) < 2:
            yield from (self.one(batch, context) for batch in batches)
            return
        pool = ThreadPoolExecutor(min(len(batches), CONCURRENT_BATCHES), "mmrl-reward-batch")
        try:
            yield from pool.map(lambda batch: self.one(batch, context), batches)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Let the thread end."""
        self._give_up(self._lane)

    def _attempt(self, samples: list[Sample], context: Context) -> Any:
        if self.reward.is_async:
            return self._within_deadline(samples, context)
        with self._turn:
            return self._within_deadline(samples, context)

    def _within_deadline(self, samples: list[Sample], context: Context) -> Any:
        with self._swap:
            if self._lane is None:
                self._lane = _LoopLane() if self.reward.is_async else _ThreadLane()
            lane = self._lane
            future = lane.start(self.reward, samples, context, self.timeout)
        grace = _GRACE_S if self.reward.is_async else 0.0
        if not wait([future], self.timeout + grace).done:
            self._give_up(lane)
            raise self._too_slow(len(samples))
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, _DeadlineError):
            raise self._too_slow(len(samples))
        if isinstance(error, UserError):
            raise BatchError(str(error), "") from error
        place = place_of(error, self.reward.file)
        raise BatchError(f"raised {describe(error)} at {place}", f"mend {place}") from error

    def _too_slow(self, n: int) -> BatchError:
        return BatchError(
            f"did not return within {self.timeout:g} s for a batch of {n}",
            f"look for what hangs in {self.reward.place}, raise timeout, or lower batch_size",
        )

    def _give_up(self, lane: _Lane | None) -> None:
        with self._swap:
            if lane is not None and self._lane is lane:
                self._lane = None
                lane.stop()


class _Lane(Protocol):
    def start(self, reward: Loaded, samples: list[Sample], context: Context, timeout: float) -> Future[Any]: ...

    def stop(self) -> None: ...


class _DeadlineError(Exception):
    pass


class _ThreadLane:
    """One daemon thread that calls sync rewards. Fed by ``start``, ends at ``stop`` once its call has returned."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Loaded, list[Sample], Context] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="mmrl-reward", daemon=True).start()

    def start(self, reward: Loaded, samples: list[Sample], context: Context, timeout: float) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, reward, samples, context))
        return future

    def stop(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, reward, samples, context = call
            _without_gradients()
            try:
                future.set_result(reward.call(samples, context=context))
            except BaseException as error:  # also sys.exit() in a reward: the caller decides what a failure costs
                future.set_exception(error)


class _LoopLane:
    """An event loop in a daemon thread, kept between calls because a reward's clients are bound to it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="mmrl-reward-loop", daemon=True).start()

    def _run(self) -> None:
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def start(self, reward: Loaded, samples: list[Sample], context: Context, timeout: float) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(self._call(reward, samples, context, timeout), self._loop)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    @staticmethod
    async def _call(reward: Loaded, samples: list[Sample], context: Context, timeout: float) -> Any:
        _without_gradients()
        task = asyncio.ensure_future(reward.call(samples, context=context))
        done, _ = await asyncio.wait([task], timeout=timeout)
        if not done:
            task.cancel()
            raise _DeadlineError
        return task.result()


def _without_gradients() -> None:
    """Scoring keeps no graph. Grad mode belongs to the thread, which is ours."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_grad_enabled(False)


def _numbers(values: Any, n: int, what: str, place: str) -> tuple[list[float], list[str | None]]:
    mend = f"return one number per sample from {place}"
    kind = type(values).__name__
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise BatchError(f"returned a {kind}{what} in place of {n} numbers", mend)
    if len(values) != n:
        raise BatchError(f"returned {len(values)} values{what} for {n} samples", mend)
    pairs = [_number(value, i, what, mend) for i, value in enumerate(values)]
    return [number for number, _ in pairs], [reason for _, reason in pairs]


def _number(value: Any, index: int, what: str, mend: str) -> tuple[float, str | None]:
    if value is None:
        return NAN, "returned None"
    if isinstance(value, Failed):
        return NAN, value.reason
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value.item() if hasattr(value, "item") else value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise BatchError(f"returned a {type(value).__name__} as value {index}{what}", mend) from None
    return (number, None) if math.isfinite(number) else (NAN, f"returned {number}")
