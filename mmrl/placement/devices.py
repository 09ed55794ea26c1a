"""One device does all of a step in turn; ``mmrl.placement.several`` shares it among several."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mmrl.batch import MicroBatch
from mmrl.checkpoint import PartState, Saved
from mmrl.engines.policy import Version
from mmrl.placement import work
from mmrl.report.clock import Clock
from mmrl.step_context import Chunk, Drawn, R, SamplingSpec, StepContext, Ts
from mmrl.trajectory import Trajectory


class Single:
    """Final class, ``Devices``: the controller's own process is its one device."""

    def alone(self, run: StepContext, weights: str) -> AbstractContextManager[None]:
        return work.apart(run, weights)

    def sample(
        self, run: StepContext, chunks: Iterable[Chunk], how: SamplingSpec, clock: Clock, version: Version | None = None
    ) -> Iterator[Drawn]:
        assert version is None  # it trains as well
        for n, (slots, ids) in enumerate(chunks):
            yield n, *work.sample(run, slots, ids, how, clock)

    def go_on(
        self,
        run: StepContext,
        parts: Sequence[Trajectory],
        most: int,
        how: SamplingSpec,
        version: Version | None = None,
    ) -> list[Trajectory]:
        assert version is None
        return [work.go_on(run, part, most, how) for part in parts]

    def version(self, run: StepContext, name: str) -> Version:
        return run.policy.version(name)

    def in_step(self, run: StepContext, n: int) -> int:
        return max(run.controller.gather(n)) if run.policy.weights.lockstep else n

    def spread(
        self,
        run: StepContext,
        task: Callable[[StepContext, Iterable[MicroBatch], *Ts], R],
        pieces: Iterable[MicroBatch],
        *arguments: *Ts,
    ) -> list[R]:
        return [work.perform(run, task, (pieces, *arguments))]

    def everywhere(self, run: StepContext, task: Callable[[StepContext, *Ts], R], *arguments: *Ts) -> R:
        return work.perform(run, task, arguments)

    def others(self, run: StepContext, task: Callable[[StepContext, *Ts], object], *arguments: *Ts) -> None:
        pass

    def beside(
        self, run: StepContext, task: Callable[[StepContext, *Ts], object], *arguments: *Ts
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_step(self) -> None:
        pass

    def end_step(self, run: StepContext, step: int) -> dict[str, float]:
        return {}

    def lines(self) -> list[dict[str, Any]]:
        return []

    def cpu_seconds(self, run: StepContext) -> float:
        return time.process_time()

    def state_dict(self) -> PartState:
        return PartState({})

    def load_state_dict(self, numbers: Any, saved: Saved) -> None:
        pass

    def close(self) -> None:
        pass
