"""An engine that runs only while its device samples: started on first use, asleep in between.

Where an engine cannot sleep (vLLM on a CPU), it is ended and started again. Either way its weights are to be sent again
after it woke; until then it may lack memory that it needs to sample. ``unfailing`` starts one again that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from torch import Tensor

from mmrl.core.errors import LostServerError, UserError
from mmrl.core.notices import starting, tell
from mmrl.core.plugins.user_code import describe, place_of
from mmrl.core.rollout_engine import Completion, ReportsMetrics, Request, RolloutEngine, Settings

T = TypeVar("T")
RESTARTS = 3
"""Losses of a server while one thing is asked of it, after which the last one is raised."""


class LazyEngine:
    """Final class. A ``RolloutEngine`` that ``start`` starts; of a device that never samples it is never started.

    ``to_sleep``: it will be put to sleep between two times that it samples; else ``sleep`` does nothing, as for an
    engine on devices of its own.
    """

    sleeps = True

    def __init__(self, start: Callable[[], RolloutEngine], *, to_sleep: bool) -> None:
        self._start, self._to_sleep = start, to_sleep
        self._engine: RolloutEngine | None = None
        self._asleep = False
        self._reported: dict[str, float] = {}

    @property
    def max_model_len(self) -> int:
        return self.ready().max_model_len

    def generate(self, requests: Sequence[Request], settings: Settings) -> list[Completion]:
        return self.ready().generate(requests, settings)

    def update(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.ready().update(weights)

    def update_lora(self, tensors: Mapping[str, Tensor], rank: int, alpha: float, targets: Sequence[str]) -> None:
        self.ready().update_lora(tensors, rank, alpha, targets)

    def sleep(self) -> None:
        """Give the memory back; the weights may be gone. Harmless when called twice, or before the first start."""
        if self._engine is None or not self._to_sleep:
            return
        with suppress(LostServerError):
            self.metrics()
        if not self._engine.sleeps:
            self.close()
        elif not self._asleep:
            with suppress(LostServerError):  # whoever wakes it hears of it
                self._engine.sleep()
            self._asleep = True

    def metrics(self) -> dict[str, float]:
        """What the engine reports, as ``engine/<name>``; while it does not run, what it reported last. Raises
        ``UserError`` from a mistake there."""
        if self._engine is not None and not self._asleep:
            self._reported = metrics_of(self._engine)
        return self._reported

    def wake(self) -> bool:
        """Have it ready; returns whether it was started for good, which no later waking is."""
        first = self._engine is None
        engine = self.ready()
        return first and (engine.sleeps or not self._to_sleep)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine, self._asleep = None, False

    def ready(self) -> RolloutEngine:
        """The engine itself, started where it was not, and awake. Raises ``UserError`` where it does not start."""
        if self._engine is None:
            self._engine = self._start()
        elif self._asleep:
            self._engine.wake()
        self._asleep = False
        return self._engine


class NoEngine:
    """Final class. The ``RolloutEngine`` of a device that never samples: another one asks the server on it.

    Where weights are in shards it takes part in gathering them, and drops them.
    """

    sleeps = True

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    def generate(self, requests: Sequence[Request], settings: Settings) -> list[Completion]:
        raise RuntimeError("a device that never samples was asked for samples")

    def update(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for _ in weights:
            pass

    def update_lora(self, tensors: Mapping[str, Tensor], rank: int, alpha: float, targets: Sequence[str]) -> None:
        """Drop the adapter."""

    def sleep(self) -> None:
        """There is nothing to free."""

    def wake(self) -> None:
        """There is nothing to wake."""

    def close(self) -> None:
        """There is nothing to end."""


class Given:
    """Counts what an engine got: ``updates`` of its weights, their bytes and seconds; ``requests``, and the ``calls``
    that they came in."""

    def __init__(self) -> None:
        self.updates, self.update_bytes, self.update_seconds = 0, 0, 0.0
        self.calls = self.requests = 0

    def asked(self, requests: int) -> None:
        """Count a call."""
        self.calls, self.requests = self.calls + 1, self.requests + requests

    def counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """``weights``, whose bytes are counted as they pass."""
        for name, tensor in weights:
            self.update_bytes += tensor.nbytes
            yield name, tensor

    def row(self) -> dict[str, float]:
        """Metrics ``perf/engine_<name>``, counted since the start of the run."""
        return {f"perf/engine_{name}": value for name, value in vars(self).items()} if self.updates else {}


def metrics_of(engine: RolloutEngine) -> dict[str, float]:
    """What ``engine`` reports, as ``engine/<name>``; nothing where it has no ``metrics``. Raises ``UserError``."""
    if not isinstance(engine, ReportsMetrics):
        return {}
    found: object = None
    try:
        found = engine.metrics()
        return {f"engine/{name}": float(value) for name, value in found.items()}
    except UserError:
        raise
    except Exception as error:
        why = f"raised {describe(error)} at {place_of(error, None)}" if found is None else f"returned {found!r}"
        raise UserError(
            f"rollout.engine: metrics() of {type(engine).__name__} {why}; return a number for each name, as in "
            '{"cache_hits": 12.0}'
        ) from error


def unfailing(engine: RolloutEngine, give: Callable[[], None], ask: Callable[[], T]) -> T:
    """What ``ask`` returns. An engine on standby whose server is lost meanwhile is started again, given its weights by
    ``give``, and asked again for everything.

    Raises ``LostServerError`` where it is lost over and over, ``UserError`` where it does not start.
    """
    return asked_again(ask, partial(_again, engine, give)) if isinstance(engine, LazyEngine) else ask()


def asked_again(ask: Callable[[], T], renew: Callable[[], None]) -> T:
    """What ``ask`` returns. Where it loses a server, ``renew`` comes before it asks again. Raises ``LostServerError``
    where it loses one over and over."""
    for lost in range(RESTARTS + 1):
        try:
            if lost:
                tell("the rollout engine is started again, and asked again for what it had not answered")
                renew()
            return ask()
        except LostServerError:
            if lost == RESTARTS:
                raise
    raise AssertionError


def _again(engine: LazyEngine, give: Callable[[], None]) -> None:
    with starting():
        engine.close()
        engine.ready()  # with the weights that it first had
        give()
