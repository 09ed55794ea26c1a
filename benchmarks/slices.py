"""A slice of a recipe's update, timed as ``mmrl train`` runs it: the product's sampling, division and backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smoke_models import timed
from smoke_place import Place

from mmrl.core.clock import Clock
from mmrl.rollout.collect import collect_batch
from mmrl.step.batch import Batch, MicroBatch, rows_of_update
from mmrl.step.micro_batches import split_micro_batches
from mmrl.step.step_context import StepContext
from mmrl.step.step_metrics import StepMetrics
from mmrl.training.loop import backward

JPEG = 'rewards=[{name: "jpeg:compressibility"}]'
"""The override of a reward that takes no time."""


@dataclass(frozen=True)
class Slices:
    """Those of the first update of a step. ``denominator``: of its loss."""

    context: StepContext
    micro_batches: Sequence[MicroBatch]
    denominator: float

    def backward(self, n: int = 0) -> None:
        """Forward and backward passes of slice ``n``, the reference's with them."""
        backward(self.context, [self.micro_batches[n]], self.denominator, 0, False)

    def milliseconds(self, place: Place, repeats: int = 5) -> float:
        """Median of the largest slice."""
        largest = max(range(len(self.micro_batches)), key=lambda n: self.micro_batches[n].padded)
        seconds = timed(place, lambda: self.backward(largest), 1 if place.small else repeats)
        self.context.policy.optimizer.zero_grad(set_to_none=True)
        return round(1000 * seconds, 1)

    @property
    def tokens(self) -> int:
        """Of the largest slice of text, padding included."""
        return max(one.padded for one in self.micro_batches)


def sampled(context: StepContext) -> Slices:
    """Sample the first step of the run, and divide its first update."""
    return divided(context, batch_of(context))


def batch_of(context: StepContext) -> Batch:
    """The samples of the first step of the run."""
    context.compute.devices.begin_step()
    slots = context.controller.slots(0, context.prompts, context.recipe.train.prompts_per_step, context.rollout.cost)
    return collect_batch(context, slots, 0, Clock(context.compute.device), StepMetrics(len(slots)))


def divided(context: StepContext, batch: Batch) -> Slices:
    """The slices of the first update over ``batch``."""
    rows = rows_of_update(batch, 0, context.recipe.train.updates_per_step)
    total = context.controller.count(context.objective.loss_denominator(batch.weights[rows], batch.lengths[rows]))
    return Slices(context, list(split_micro_batches(context, batch, rows)), total)


def closed(context: StepContext) -> None:
    """End what the run has open."""
    context.rewards.close()
    context.pipeline.close()


@contextlib.contextmanager
def as_before(context: StepContext) -> Iterator[None]:
    """Inside the block, adapters turn their input into float32 and multiply in it, as peft does by itself."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in context.policy.module.modules() if isinstance(module, LoraLayer)]
    parts = [part for one in layers for part in (*one.lora_A.values(), *one.lora_B.values())]
    casts = [one.cast_input_dtype_enabled for one in layers]
    own = [(part, part.__dict__.pop("forward")) for part in parts if "forward" in part.__dict__]
    for one in layers:
        one.cast_input_dtype_enabled = True
    try:
        yield
    finally:
        for one, cast in zip(layers, casts, strict=True):
            one.cast_input_dtype_enabled = cast
        for part, forward in own:
            part.forward = forward
