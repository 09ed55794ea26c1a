"""Call a reward on batches of samples: with a deadline, retries, and a check of the answer. Imports no torch.

A reward runs in its own thread (an async one in an event loop there). A thread that exceeds the deadline is abandoned:
it is a daemon, so the process can end. ``submit`` returns at once: sync calls are queued, async ones run concurrently.
"""

from __future__ import annotations

import asyncio
import math
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Protocol, SupportsFloat, SupportsIndex, TypeAlias, runtime_checkable

from mmrl.errors import UserError, plain
from mmrl.rewards.contract import Context, Failed, Span, Spans
from mmrl.rewards.loading import Loaded
from mmrl.rewards.views import views
from mmrl.trajectory import Sample
from mmrl.user_code import raised

NAN = float("nan")
BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""Seconds before the first retry, doubled for each further one, and their limit."""
CONCURRENT_BATCHES = 64  # of an async reward
_GRACE_S = 1.0


class BatchError(Exception):
    """A call gave no usable answer for any of its samples. ``mend`` is the edit that helps."""

    def __init__(self, reason: str, mend: str) -> None:
        super().__init__(reason, mend)
        self.reason, self.mend = reason, mend

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Answer:
    """The answer of a reward for ``n`` samples.

    ``total``: ``n`` numbers, NaN where a sample failed; ``reasons``: why, None where it did not. ``parts``: ``n``
    numbers per named part, NaN where a sample has none. ``spans``: the rewards of pieces of each response, or None.
    ``error``: set when the whole call failed. ``began`` and ``ended``: ``time.perf_counter``, retries included.
    ``sent``: bytes given to other processes (``Context.sent``), of an answer that a device made.
    """

    total: list[float]
    reasons: list[str | None]
    parts: dict[str, list[float]] = field(default_factory=dict)
    spans: list[list[Span] | None] = field(default_factory=list)
    error: BatchError | None = None
    began: float = 0.0
    ended: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)


def read_answer(returned: object, n: int, place: str, *, spans: bool = False) -> Answer:
    """Check what a reward returned for ``n`` samples; ``spans``: it declared that it returns some.

    Raises ``BatchError`` when it is not one value per sample.
    """
    nothing: list[list[Span] | None] = [None] * n
    if not isinstance(returned, Mapping):
        return Answer(*_numbers(returned, n, "", place), spans=nothing)
    named = {str(name): values for name, values in returned.items() if name != "spans"}
    if not named:
        what = "spans alone" if returned else "an empty dict"
        raise BatchError(f"returned {what}", f"return at least one named part, such as score, from {place}")
    pieces = _pieces(returned["spans"], n, place, spans) if "spans" in returned else nothing
    read = {name: _numbers(values, n, f" for the part {name!r}", place) for name, values in named.items()}
    parts = {name: numbers for name, (numbers, _) in read.items()}
    if "score" in parts:
        total, reasons = read["score"]
        return Answer(total, reasons, {k: v for k, v in parts.items() if k != "score"}, pieces)
    total = [math.fsum(row) / len(row) for row in zip(*parts.values(), strict=True)]
    reasons = [
        next((f"part {name!r} {why[i]}" for name, (_, why) in read.items() if why[i] is not None), None)
        for i in range(n)
    ]
    return Answer(total, reasons, parts, pieces)


class Calls(Protocol):
    """Calls a reward on batches, in this process or in another."""

    def submit(self, samples: Sequence[Sample], context: Context) -> Future[Answer]:
        """The future of the answer for one batch; returns at once. ``cancel`` works until the call begins."""
        ...

    def close(self) -> None: ...


class Caller:
    """Calls one reward. ``timeout`` is in seconds for one batch; a failed batch is tried ``retries`` times more.

    Each attempt gets a copy of the samples, so that the reward may change what it is given.

    Thread-safe; calls of a sync reward run one after another, those of an async one concurrently.
    """

    def __init__(self, reward: Loaded, timeout: float, retries: int = 0) -> None:
        self.reward, self.retries = reward, retries
        self.timeout = math.inf if reward.declaration.own_deadline else timeout
        self._lane: _Lane | None = None
        self._swap = threading.Lock()
        self._turn = threading.Lock()
        self._workers = _Workers(CONCURRENT_BATCHES if reward.is_async else 1)

    def one(self, samples: Sequence[Sample], context: Context) -> Answer:
        """The answer for one batch. An error of the reward is not raised: see ``Answer.error``."""
        error, began = BatchError("was not called", ""), time.perf_counter()
        declared = self.reward.declaration
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(BACKOFF_S * 2 ** (attempt - 1), MAX_BACKOFF_S))
            try:
                returned = self._attempt(views(samples), context)  # an abandoned call may still change its own copy
                answer = read_answer(returned, len(samples), self.reward.place, spans=declared.spans)
                return replace(answer, began=began, ended=time.perf_counter())
            except BatchError as failure:
                error = failure
        if self.retries:
            error = BatchError(f"{error.reason} (after {self.retries + 1} attempts)", error.mend)
        n, ended = len(samples), time.perf_counter()
        return Answer([NAN] * n, [error.reason] * n, spans=[None] * n, error=error, began=began, ended=ended)

    def submit(self, samples: Sequence[Sample], context: Context) -> Future[Answer]:
        """The future of the answer for one batch; returns at once. ``cancel`` works until the call begins."""
        return self._workers.submit(lambda: self.one(samples, context))

    def many(self, batches: Sequence[Sequence[Sample]], context: Context) -> Iterator[Answer]:
        """The answers for ``batches``, in order. All of them are submitted when the first is read."""
        answers = [self.submit(batch, context) for batch in batches]
        try:
            yield from (answer.result() for answer in answers)
        finally:
            for answer in answers:
                answer.cancel()

    def close(self) -> None:
        """Let the threads end, and the reward close what it holds where it has a method ``close``.

        Threads that are idle are waited for: one that frees a model's tensors while the interpreter shuts down aborts
        the process. One that is busy is given up after a second.
        """
        lane, self._lane = self._lane, None
        threads = self._workers.stop()
        if lane is not None:
            threads.append(lane.stop())
        until = time.monotonic() + _GRACE_S
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        self.reward.close()

    def _attempt(self, samples: list[Sample], context: Context) -> object:
        if self.reward.is_async:
            return self._within_deadline(samples, context)
        with self._turn:
            return self._within_deadline(samples, context)

    def _within_deadline(self, samples: list[Sample], context: Context) -> object:
        meta = samples[0].prompt.meta if samples else {}  # now: the reward may empty its list
        with self._swap:
            if self._lane is None:
                self._lane = _LoopLane() if self.reward.is_async else _ThreadLane()
            lane = self._lane
            future = lane.start(self.reward, samples, context, self.timeout)
        limit = None if math.isinf(self.timeout) else self.timeout + (_GRACE_S if self.reward.is_async else 0.0)
        if not wait([future], limit).done:
            self._give_up(lane)
            raise self._too_slow(len(samples))
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, _DeadlineError):
            raise self._too_slow(len(samples))
        if isinstance(error, UserError):
            raise BatchError(plain(str(error)), "") from error
        raise BatchError(*raised(error, self.reward.file, meta)) from error

    def _too_slow(self, n: int) -> BatchError:
        return BatchError(
            f"did not return within {self.timeout:g} s for a batch of {n}",
            f"look for what hangs in {self.reward.place}, raise timeout, or lower batch_size",
        )

    def _give_up(self, lane: _Lane) -> None:
        with self._swap:
            if self._lane is lane:
                self._lane = None
                lane.stop()


class _Workers:
    """Daemon threads, at most ``most``, that make calls in the order of ``submit``; started when they are needed.

    Each waits for a call, and is unblocked by ``submit`` and ``stop``. At its end, the process would wait for a pool of
    the standard library.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: _Line = queue.SimpleQueue()
        self._free = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], Answer]) -> Future[Answer]:
        future: Future[Answer] = Future()
        with self._lock:
            if not self._free.acquire(blocking=False) and len(self._threads) < self._most:
                self._threads.append(_started(_work, "mmrl-reward-batch", self._calls, self._free))
            self._calls.put((future, call))
        return future

    def stop(self) -> list[threading.Thread]:
        """Let every thread end after the calls in the queue. A later ``submit`` starts new threads."""
        with self._lock:
            threads = self._threads
            for _ in threads:
                self._calls.put(None)
            self._calls, self._free, self._threads = queue.SimpleQueue(), threading.Semaphore(0), []
        return threads


_Line: TypeAlias = "queue.SimpleQueue[tuple[Future[Answer], Callable[[], Answer]] | None]"


def _started(target: Callable[..., None], name: str, *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread


def _work(calls: _Line, free: threading.Semaphore) -> None:
    while (item := calls.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del future, call, item  # a thread that waits for work keeps no samples
        free.release()


class _Lane(Protocol):
    def start(self, reward: Loaded, samples: list[Sample], context: Context, timeout: float) -> Future[object]: ...

    def stop(self) -> threading.Thread:
        """Let the thread end, and return it."""
        ...


class _DeadlineError(Exception):
    pass


_Call: TypeAlias = tuple[Future[object], Loaded, list[Sample], Context]


class _ThreadLane:
    """One daemon thread that calls sync rewards. Fed by ``start``, ends at ``stop`` once its call has returned."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[object], Loaded, list[Sample], Context] | None] = (
            queue.SimpleQueue()
        )
        self._thread = _started(self._run, "mmrl-reward")

    def start(self, reward: Loaded, samples: list[Sample], context: Context, timeout: float) -> Future[object]:
        future: Future[object] = Future()
        self._calls.put((future, reward, samples, context))
        return future

    def stop(self) -> threading.Thread:
        self._calls.put(None)
        return self._thread

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, reward, samples, context = call
            _without_gradients()
            try:
                future.set_result(reward.call(samples, context=context))
            except BaseException as error:  # also sys.exit() in a reward: the caller decides what a failure costs
                future.set_exception(error)
            del future, call, reward, samples, context


class _LoopLane:
    """An event loop in a daemon thread, kept between calls because a reward's clients are bound to it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = _started(self._run, "mmrl-reward-loop")

    def _run(self) -> None:
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def start(self, reward: Loaded, samples: list[Sample], context: Context, timeout: float) -> Future[object]:
        return asyncio.run_coroutine_threadsafe(self._call(reward, samples, context, timeout), self._loop)

    def stop(self) -> threading.Thread:
        self._loop.call_soon_threadsafe(self._loop.stop)
        return self._thread

    @staticmethod
    async def _call(reward: Loaded, samples: list[Sample], context: Context, timeout: float) -> object:
        _without_gradients()
        task = asyncio.ensure_future(reward.call(samples, context=context))
        done, _ = await asyncio.wait([task], timeout=None if math.isinf(timeout) else timeout)
        if not done:
            task.cancel()
            raise _DeadlineError
        return task.result()


def _without_gradients() -> None:
    """Scoring keeps no graph. Grad mode belongs to the thread, which is ours."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_grad_enabled(False)


@runtime_checkable
class _Tensor(Protocol):
    def detach(self) -> _Tensor: ...

    def cpu(self) -> _Tensor: ...


@runtime_checkable
class _Array(Protocol):
    def tolist(self) -> object: ...


@runtime_checkable
class _Scalar(Protocol):
    def item(self) -> object: ...


def _numbers(values: object, n: int, what: str, place: str) -> tuple[list[float], list[str | None]]:
    mend = f"return one number per sample from {place}"
    kind = type(values).__name__
    if isinstance(values, _Tensor):
        values = values.detach().cpu()
    if isinstance(values, _Array):
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise BatchError(f"returned a {kind}{what} in place of {n} numbers", mend)
    if len(values) != n:
        raise BatchError(f"returned {len(values)} values{what} for {n} samples", mend)
    pairs = [_number(value, i, what, mend) for i, value in enumerate(values)]
    return [number for number, _ in pairs], [reason for _, reason in pairs]


def _pieces(values: object, n: int, place: str, declared: bool) -> list[list[Span] | None]:
    if not declared:
        raise BatchError("returned spans, which it did not declare", f"add @mmrl.reward(spans=True) at {place}")
    if isinstance(values, str | bytes) or not isinstance(values, Sequence) or len(values) != n:
        raise BatchError(
            f"returned no list of {n} spans", f"return Spans([(start, end, value), ...]) or None at {place}"
        )
    wrong = next((v for v in values if v is not None and not isinstance(v, Spans)), None)
    if wrong is not None:
        raise BatchError(f"returned a {type(wrong).__name__} as spans", f"wrap it at {place}: Spans(...)")
    return [None if v is None else [Span(*span) for span in v.spans] for v in values]


def _number(value: object, index: int, what: str, mend: str) -> tuple[float, str | None]:
    if value is None:
        return NAN, "returned None"
    if isinstance(value, Failed):
        return NAN, plain(str(value.reason))
    try:
        plain_value = value.item() if isinstance(value, _Scalar) else value
        if not isinstance(plain_value, SupportsFloat | SupportsIndex):
            raise TypeError
        number = float(plain_value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise BatchError(f"returned a {type(value).__name__} as value {index}{what}", mend) from None
    return (number, None) if math.isfinite(number) else (NAN, f"returned {number}")
