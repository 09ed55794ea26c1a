"""One device runs all phases of a step in turn; ``mmrl.placement.multi_device`` divides a step over several."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

from mmrl.core.clock import Clock
from mmrl.core.notices import starting
from mmrl.core.trajectory import TextRows
from mmrl.models.policy import Version
from mmrl.placement import device_tasks
from mmrl.step.batch import MicroBatch
from mmrl.step.step_context import Chunk, Devices, Drawn, R, SamplingSpec, StepContext, Ts


class SingleDevice(Devices):
    """Final class: the controller's own process is its one device.

    With ``placement.sleep`` an engine and the judge models stay awake until training starts: samples are judged while
    others are drawn.
    """

    def __init__(self) -> None:
        self._ready: set[str] = set()
        """The roles that the device has switched to since it last trained, or training itself."""
        self._turning = 0.0
        """Seconds of this step."""

    @contextmanager
    def sampling_phase(self, context: StepContext, weights: str) -> Generator[None]:
        self._switch_role(context, "rollout")
        with device_tasks.sampling_phase(context, weights):
            yield

    def _switch_role(self, context: StepContext, role: str) -> None:
        """Wake the models that ``role`` needs; for training put everything to sleep that can."""
        if not context.recipe.placement.sleep or role in self._ready:
            return
        began, trains = time.perf_counter(), role == "train"
        with starting():
            device_tasks.perform(context, device_tasks.switch_role, (role, trains))
        self._ready = {role} if trains else self._ready - {"train"} | {role}
        self._turning += time.perf_counter() - began

    def sample(
        self,
        context: StepContext,
        chunks: Iterable[Chunk],
        how: SamplingSpec,
        clock: Clock,
        version: Version | None = None,
    ) -> Iterator[Drawn]:
        assert version is None  # this device also trains
        if not how.evaluate:
            self._switch_role(context, "judge")
        in_chunks = context.recipe.rollout.in_process or context.pipeline.makes != "text"
        if in_chunks and not device_tasks.refills(context):
            for n, chunk in enumerate(chunks):
                yield n, *device_tasks.sample(context, chunk, how, clock)
        else:
            yield from self._by_engine(context, chunks, how, clock)
        if how.evaluate:  # an evaluation judges after all samples are drawn
            self._switch_role(context, "judge")

    def _by_engine(
        self, context: StepContext, chunks: Iterable[Chunk], how: SamplingSpec, clock: Clock
    ) -> Iterator[Drawn]:
        done = 0
        for some in _rounds(chunks, context.recipe.train.prompts_per_step * context.recipe.begun_per_prompt):
            for n, drawn in enumerate(device_tasks.sample_at_once(context, some, how, clock), done):
                yield n, *drawn
            done += len(some)

    def continue_generation(
        self,
        context: StepContext,
        parts: Sequence[TextRows],
        most: int,
        how: SamplingSpec,
        version: Version | None = None,
    ) -> list[TextRows]:
        assert version is None
        self._switch_role(context, "judge")
        return device_tasks.continue_all(context, parts, most, how)

    def version(self, context: StepContext, name: str) -> Version:
        return context.policy.version(name)

    def lockstep_count(self, context: StepContext, n: int) -> int:
        return max(context.controller.gather(n)) if context.policy.weights.lockstep else n

    def map_micro_batches(
        self,
        context: StepContext,
        task: Callable[[StepContext, Iterable[MicroBatch], *Ts], R],
        micro_batches: Iterable[MicroBatch],
        *arguments: *Ts,
    ) -> list[R]:
        self._switch_role(context, "train")
        return [device_tasks.perform(context, task, (micro_batches, *arguments))]

    def run_on_trainers(self, context: StepContext, task: Callable[[StepContext, *Ts], R], *arguments: *Ts) -> R:
        return device_tasks.perform(context, task, arguments)

    def begin_step(self) -> None:
        self._turning = 0.0

    def end_step(self, context: StepContext, step: int) -> dict[str, float]:
        return (
            {"placement/wake": sum(context.controller.gather(self._turning))} if context.recipe.placement.sleep else {}
        )


def _rounds(chunks: Iterable[Chunk], rows: int) -> Iterator[list[Chunk]]:
    """Group ``chunks`` to about ``rows`` rows each, the number that a step samples, so that an evaluation of many
    prompts holds no more features at once."""
    some: list[Chunk] = []
    for chunk in chunks:
        some.append(chunk)
        if sum(len(one.ids) for one in some) >= rows:
            yield some
            some = []
    if some:
        yield some
