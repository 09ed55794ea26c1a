"""Call a reward on batches of samples, with a deadline and retries. Imports no torch.

A reward runs in its own thread (an async one in an event loop there). A thread that exceeds the deadline is abandoned:
it is a daemon, so the process can end. ``submit`` returns at once: sync calls are queued, async ones run concurrently.
A sync reward that computes on a CUDA device has a stream of its own there.
"""

from __future__ import annotations

import asyncio
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from mmrl.core import torch_state
from mmrl.core.errors import UserError, plain
from mmrl.core.plugins.user_code import raised, said_by
from mmrl.core.reward_contract import Asked, Context
from mmrl.core.trajectory import Sample
from mmrl.rewards.last_words import check_alarm, watched
from mmrl.rewards.loading import Loaded
from mmrl.rewards.own_stream import OwnStream
from mmrl.rewards.returned import NAN, Answer, BatchError, read_answer
from mmrl.rewards.views import views

if TYPE_CHECKING:
    import torch

BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""Seconds before the first retry, doubled for each further one, and their limit."""
CONCURRENT_BATCHES = 64  # of an async reward
_GRACE_S = 1.0
T = TypeVar("T")


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
        self._stream = OwnStream(wanted=reward.declaration.device and not reward.is_async)
        self._lane: _ThreadLane | _LoopLane | None = None
        self._swap = threading.Lock()
        self._turn = nullcontext() if reward.is_async else threading.Lock()
        self._workers = _Workers(CONCURRENT_BATCHES if reward.is_async else 1, "mmrl-reward-batch")

    def one(self, samples: Sequence[Sample], context: Context) -> Answer:
        """The answer for one batch. An error of the reward is not raised: see ``Answer.error``."""
        return self._one(samples, context, self._stream.mark(context.device))

    def _one(self, samples: Sequence[Sample], context: Context, mark: torch.cuda.Event | None) -> Answer:
        """``mark`` stands behind all that the device computes ``samples`` from."""
        error, began = BatchError("was not called", ""), time.perf_counter()
        declared = self.reward.declaration
        context = replace(context, asked=Asked())
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(BACKOFF_S * 2 ** (attempt - 1), MAX_BACKOFF_S))
            try:
                with self._stream.behind(mark, context.device, samples):
                    given = views(samples)  # an abandoned call may still change its own copy
                    with self._turn:
                        returned = self._within_deadline(given, context)
                    answer = read_answer(returned, len(samples), self.reward.place, spans=bool(declared.spans))
                return self._timed(answer, context, began)
            except BatchError as failure:
                error = failure
        if self.retries:
            error = BatchError(f"{error.reason} (after {self.retries + 1} attempts)", error.mend)
        n = len(samples)
        return self._timed(Answer([NAN] * n, [error.reason] * n, spans=[None] * n, error=error), context, began)

    def _timed(self, answer: Answer, context: Context, began: float) -> Answer:
        """A reward that does not count its requests makes one in each call."""
        ended, asked = time.perf_counter(), context.asked
        if not asked.requests:
            asked = Asked(1, ended - began, CONCURRENT_BATCHES if self.reward.is_async else 1)
        return replace(answer, began=began, ended=ended, asked=asked)

    def submit(self, samples: Sequence[Sample], context: Context) -> Future[Answer]:
        """The future of the answer for one batch; returns at once. ``cancel`` works until the call begins."""
        mark = self._stream.mark(context.device)
        answer = self._workers.submit(lambda: self._one(samples, context, mark))
        if torch_state.changes_settings(self.reward.name):  # nothing else computes meanwhile
            wait([answer])
        return answer

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
        threads, until = self._workers.stop(), time.monotonic() + _GRACE_S
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        with self._swap:
            lane, self._lane = self._lane, None
        if lane is not None:
            last = lane.stop()
            last.join(max(until - time.monotonic(), 0.0))
            if last.is_alive():
                torch_state.give_up(last)
        self.reward.close()

    def _within_deadline(self, samples: list[Sample], context: Context) -> object:
        meta = samples[0].prompt.meta if samples else {}  # now: the reward may empty its list
        with self._swap:
            if self._lane is None:
                self._lane = _LoopLane() if self.reward.is_async else _ThreadLane(self._stream)
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
            raise BatchError(plain(said_by(error)), "") from error
        raise BatchError(*raised(error, self.reward.file, meta)) from error

    def _too_slow(self, n: int) -> BatchError:
        return BatchError(
            f"did not return within {self.timeout:g} s for a batch of {n}",
            f"look for what hangs in {self.reward.place}, raise timeout, or lower batch_size",
        )

    def _give_up(self, lane: _ThreadLane | _LoopLane) -> None:
        with self._swap:
            if self._lane is lane:
                self._lane = None
                torch_state.give_up(lane.stop())


class _Workers:
    """Daemon threads, at most ``most``, that make calls in the order of ``submit``; started when they are needed.

    Each waits for a call, and is unblocked by ``submit`` and ``stop``. At its end, the process would wait for a pool of
    the standard library.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: _Line = queue.SimpleQueue()
        self._free = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if not self._free.acquire(blocking=False) and len(self._threads) < self._most:
                self._threads.append(_started(_work, self._name, self._calls, self._free))
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


_Line: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Callable[[], object]] | None]"


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
            except BaseException as error:  # also sys.exit() in a reward: the caller decides what a failure costs
                future.set_exception(error)
        del future, call, item  # a thread that waits for work keeps no samples
        free.release()


class _DeadlineError(Exception):
    pass


class _ThreadLane:
    """One daemon thread that calls sync rewards. Fed by ``start``, ends at ``stop`` once its call has returned."""

    def __init__(self, stream: OwnStream) -> None:
        self._stream, self._workers = stream, _Workers(1, "mmrl-reward")

    def start(self, reward: Loaded, samples: list[Sample], context: Context, timeout: float) -> Future[object]:
        return self._workers.submit(lambda: self._call(reward, samples, context))

    def stop(self) -> threading.Thread:
        """Let the thread, which ``start`` began, end, and return it."""
        return self._workers.stop()[0]

    def _call(self, reward: Loaded, samples: list[Sample], context: Context) -> object:
        _without_gradients()
        with self._stream.here(context.device), watched(reward.name, here=False, folder=context.folder):
            returned = reward.call(samples, context=context)
            check_alarm(reward.name)
        return returned


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
        with watched(reward.name, here=False, folder=context.folder):
            task = asyncio.ensure_future(reward.call(samples, context=context))
            done, _ = await asyncio.wait([task], timeout=None if math.isinf(timeout) else timeout)
            if not done:
                task.cancel()
                raise _DeadlineError
            check_alarm(reward.name)
            return task.result()


def _without_gradients() -> None:
    """Scoring keeps no graph. Grad mode belongs to the thread, which is ours."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_grad_enabled(False)
