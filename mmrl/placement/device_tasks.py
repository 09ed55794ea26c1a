"""Device tasks: functions of the ``StepContext`` in a device's process.

Samples and slices are computed by the same functions on every device; only their distribution differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmrl.algorithms.objective import copies_of
from mmrl.core.clock import Clock
from mmrl.core.errors import NotFiniteError
from mmrl.core.out_of_memory import in_parts, in_phase
from mmrl.core.trajectory import DenoisingRows, R, Rows, Sample, TextRows
from mmrl.models.policy import Version
from mmrl.models.protocol import of_pictures, of_text
from mmrl.placement.utilisation import of_gpu
from mmrl.rewards.returned import Answer
from mmrl.step.batch import MicroBatch
from mmrl.step.step_context import Chunk, SamplingSpec, StepContext
from mmrl.step.update import recompute


def sample(
    context: StepContext, chunk: Chunk, how: SamplingSpec, clock: Clock | None = None
) -> tuple[Rows, list[Sample]]:
    """Sample a micro-batch and decode it; of samples that are begun only (``how.until``) the predicted results. Where
    results of steps are scored (``scores_steps``), those predicted before each recorded step are behind the samples."""
    clock = clock or Clock(torch.device("cpu"))
    with context.policy.using(how.weights), torch.no_grad():
        with clock("sample"):
            context.pipeline.sync(context.policy)
            made = _sampled(context, chunk, how, whole=sharing(context) > 1)  # one alone cannot go on with fewer rows
        shown = _shown(context, made, how, clock)
        if isinstance(made, DenoisingRows) and made.predicted is not None:
            before, made = made.predicted.unbind(1), replace(made, predicted=None)
            for clean in before:
                shown += _shown(context, replace(made, clean=clean), how, clock)
        return made, shown


def sharing(context: StepContext) -> int:
    """How many devices draw each sample together."""
    width = context.policy.weights.width
    return 1 if width == 1 or context.pipeline.makes == "text" else width


def sample_beside(context: StepContext, chunk: Chunk, how: SamplingSpec) -> None:
    """Sample a micro-batch together with a device that decodes it (``sample``)."""
    with context.policy.using(how.weights), torch.no_grad(), in_phase("sample"):
        _drawn(context, chunk, range(len(chunk.ids)), how)


def _sampled(context: StepContext, chunk: Chunk, how: SamplingSpec, *, whole: bool) -> Rows:
    """The rows of a micro-batch: ``whole``, or fewer at once where memory has run out."""

    def drawn(rows: range) -> Rows:
        return _drawn(context, chunk, rows, how)

    if whole:
        return drawn(range(len(chunk.ids)))
    parts = in_parts(context.compute.local.at_once, "sample", len(chunk.ids), drawn, _batch_size_edit(context))
    return parts[0] if len(parts) == 1 else Rows.join(parts)


def _drawn(context: StepContext, chunk: Chunk, rows: range, how: SamplingSpec) -> Rows:
    """These ``rows`` of a micro-batch."""
    if chunk.begun is not None:
        begun = chunk.begun if len(rows) == len(chunk.begun) else chunk.begun.rows(list(rows))
        assert context.recipe.midway is not None
        return context.pipeline.finish(begun, how.actions, how.seed, context.recipe.midway.at)
    of, tag = (chunk.slots[rows.start : rows.stop], chunk.ids[rows.start : rows.stop]), context.policy.tag
    if how.draft is not None:
        return of_pictures(context.pipeline).draft(*of, how.seed, how.draft)
    if how.until is not None:
        return context.pipeline.begin(*of, how.actions, how.seed, how.until, tag)
    return context.pipeline.sample(*of, how.actions, how.seed, evaluate=how.evaluate, version=tag)


def sample_at_once(
    context: StepContext, chunks: Sequence[Chunk], how: SamplingSpec, clock: Clock
) -> Iterator[tuple[Rows, list[Sample]]]:
    """Sample several micro-batches in one call of what chooses its own batches; each is decoded separately.

    Of an engine there is no retry with fewer rows: its memory does not depend on the number of rows in a call.
    """
    slots, ids = [slot for chunk in chunks for slot in chunk.slots], [i for chunk in chunks for i in chunk.ids]
    begun = [chunk.begun for chunk in chunks if chunk.begun is not None]
    asked = Chunk(slots, ids, Rows.join(begun) if begun else None)
    with context.policy.using(how.weights), torch.no_grad(), clock("sample"), in_phase("sample"):
        context.pipeline.sync(context.policy)
        whole = _sampled(context, asked, how, whole=not refills(context))
    for part in _divided(whole, [len(chunk.ids) for chunk in chunks]):
        yield part, _shown(context, part, how, clock)


def refills(context: StepContext) -> bool:
    """Whether rows of this process take the places of those that have ended, in this micro-batch or another."""
    return context.pipeline.makes == "text" and of_text(context.pipeline).refills


def _divided(whole: R, sizes: Sequence[int]) -> Iterator[R]:
    first = 0
    for size in sizes:
        yield whole.rows(list(range(first, first + size)))
        first += size


def _shown(context: StepContext, whole: Rows, how: SamplingSpec, clock: Clock) -> list[Sample]:
    """Decode a micro-batch to the samples that rewards get."""

    def shown(rows: range) -> list[Sample]:
        part = whole if len(rows) == len(whole) else whole.rows(list(rows))
        return context.pipeline.samples(part, how.inputs)

    with clock("decode"):
        parts = in_parts(
            context.compute.local.at_once, "decode", len(whole), shown, "sampling.batch_size={} starts with that"
        )
        return [sample for part in parts for sample in part]


def _batch_size_edit(context: StepContext) -> str:
    """The edit that makes sampling start with a number of rows that fits into memory."""
    edit = "sampling.batch_size={} starts with that"
    if context.recipe.model.dtype == "float32" or context.objective.kind != "policy_gradient":
        return edit
    dtype = context.recipe.model.dtype
    return f"{edit}; {dtype} rounds differently in training's larger batch, so lower train.micro_batch_size as well"


def continue_generation(context: StepContext, rows: TextRows, most: int, how: SamplingSpec) -> TextRows:
    """Draw at most ``most`` more tokens for every row; no row may be finished."""
    with context.policy.using(how.weights):
        pipeline = of_text(context.pipeline)
        pipeline.sync(context.policy)
        return pipeline.continue_generation(rows, most, how.seed)


def continue_all(context: StepContext, parts: Sequence[TextRows], most: int, how: SamplingSpec) -> list[TextRows]:
    """``continue_generation`` for the rows of several in one call of the engine."""
    return list(_divided(continue_generation(context, Rows.join(parts), most, how), [len(part) for part in parts]))


def enter_sampling(context: StepContext, weights: str) -> None:
    """Enter ``sampling_phase`` on this device; ``leave_sampling`` ends it."""
    context.compute.local.phase.enter_context(sampling_phase(context, weights))


@contextmanager
def sampling_phase(context: StepContext, weights: str) -> Generator[None]:
    """A phase in which this device samples without collectives, with the copy ``weights`` of the policy.

    Sharded weights are gathered for its duration. If an engine samples, they are sent to it tensor by tensor instead,
    and none stays gathered. All devices of all controllers enter and leave the phase together.
    """
    policy = context.policy
    if context.recipe.rollout.in_process or not policy.weights.in_shards:
        with policy.unsharded(weights):
            yield
    else:
        with policy.using(weights):
            context.pipeline.sync(context.policy)
            yield


def leave_sampling(context: StepContext) -> None:
    """End the phase that ``enter_sampling`` began."""
    context.compute.local.phase.close()


def score(context: StepContext, label: str, samples: Sequence[Sample], step: int) -> Answer:
    """One reward's answer for a batch, from its model on this device."""
    return context.rewards.answer(label, samples, step)


def prepare(
    context: StepContext, micro_batches: Iterable[MicroBatch], wanted: frozenset[str]
) -> list[tuple[list[int], list[int], dict[str, Tensor]]]:
    """Recompute tensors before the first update; returns each with its rows of the batch and its entries.

    If code without a gradient rounds differently, they are computed with a gradient, as in the update.
    """
    micro_batches = list(micro_batches)
    calls = [wanted] if context.policy.weights.stages is None else [frozenset({name}) for name in sorted(wanted)]
    out = []
    with torch.set_grad_enabled(context.recipe.replays_first):
        for names in calls:

            def made(
                micro_batch: MicroBatch, names: frozenset[str] = names
            ) -> tuple[list[int], list[int], dict[str, Tensor]]:
                seed, using = context.recipe.seed, context.policy.using
                new = recompute(
                    context.pipeline, context.objective, micro_batch.rows, micro_batch.entries, names, seed, using
                )
                kept = torch.stack([new[name].detach() for name in names]).cpu()  # wait for the device once
                return micro_batch.index, micro_batch.entries, dict(zip(names, kept, strict=True))

            out += context.policy.each(micro_batches, made)
    context.policy.put_away()
    return out


def apply(context: StepContext, spent: float) -> dict[str, float]:
    """The optimizer step, with the gradients of all devices of all controllers; ``spent`` as in ``train_step``."""
    metrics: dict[str, float] = {}
    for name, policy in context.trained.items():
        policy.spent = spent
        try:
            found = policy.apply()
        except NotFiniteError as error:
            if name == "policy":
                raise
            raise NotFiniteError(f"the {name}: {error}") from error
        metrics |= found if name == "policy" else renamed(found)
    return metrics


def update_copies(context: StepContext, step: int) -> None:
    """Move the copies of the policy (ema, old) towards its weights, after the updates of a step."""
    for name, decay in copies_of(context.objective).items():
        if context.rollout.strategy.staleness:
            context.policy.age(name, context.rollout.strategy.staleness)
        context.policy.move(name, decay(step))


def release(context: StepContext) -> None:
    """Drop the features that the controller sent here for the step."""
    context.pipeline.features.release(context.compute.local.held)
    context.compute.local.held.clear()


def save(context: StepContext, step: int) -> None:
    """Save this device's shards after ``step`` steps, together with all other devices."""
    if context.compute.local.save is not None:
        context.compute.local.save(step)


def version(context: StepContext, name: str, first: bool) -> Version | None:
    """The current weights of the policy's copy ``name``, from the ``first`` training device; all must call it."""
    found = context.policy.version(name) if first or context.policy.weights.in_shards else None
    return found if first else None


def load_version(context: StepContext, version: Version) -> None:
    """Load this version of the weights for sampling."""
    context.policy.load_version(version)


def switch_role(context: StepContext, role: str, sleep: bool, judge: str = "", alone: bool = False) -> bool:
    """Wake the models that ``role`` needs on this device: ``judge`` (empty: all judges), or the engine that samples.

    ``sleep``: put all others to sleep first, ``alone``: other judges too. Returns whether something was started for the
    first time, so that the time says nothing about the next switch.
    """
    if sleep:
        if role != "judge" or alone:
            context.rewards.sleep(but=judge if role == "judge" else "")
        if role != "rollout":
            context.pipeline.sleep()
        free(context)  # woken models get memory from the driver, not from torch's cache
    if role == "judge":
        return context.rewards.wake(judge)
    return role == "rollout" and context.pipeline.makes == "text" and of_text(context.pipeline).wake()


def free(context: StepContext) -> None:
    """Give memory that torch keeps without using it back to the driver, from which other processes get it."""
    if context.compute.device.type == "cuda":
        torch.cuda.empty_cache()


def ready(context: StepContext, role: str) -> None:
    """Do nothing: before this task the device has switched to ``role``."""


def cpu_seconds(context: StepContext) -> float:
    """CPU time of this process so far."""
    return time.process_time()


def gpu(context: StepContext) -> float | None:
    """Share of the time since the last call in which this GPU was busy; None if that is not known."""
    return of_gpu(context.compute.device)


def renamed(critic: dict[str, float]) -> dict[str, float]:
    """The critic's metrics under the critic's names."""
    return {name.replace("optim/", "value/"): value for name, value in critic.items()}


def perform(context: StepContext, task: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run ``task`` and return its result; an out-of-memory error is reported with the task's phase."""
    with in_phase(_PHASES.get(task.__name__, task.__name__)):
        return task(context, *arguments)


_PHASES = {
    "continue_generation": "sample",
    "sample_beside": "sample",
    "enter_sampling": "sample",
    "score": "judge",
    "backward": "train",
    "apply": "optimizer",
}
"""The plan's name of a task's phase, if it differs from the task's name."""
