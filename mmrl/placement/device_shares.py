"""Divide a step over several devices: slices by size, and the features that each device needs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from mmrl.controller.workload_balance import divide, greedy
from mmrl.core.trajectory import Slot
from mmrl.episodes.loading import draws
from mmrl.step.batch import MicroBatch, without_weight
from mmrl.step.step_context import StepContext


def needs(context: StepContext, role: str, judge: str) -> set[str]:
    """The models that must be awake for ``role``, among those that can sleep: a judge (empty: all), an engine that
    samples and a model that draws."""
    has = {f"judge {name}" for name in ([judge] if judge else context.rewards.on_device)} if role == "judge" else set()
    sleeps = not context.recipe.rollout.in_process or draws(context.recipe.environment)
    return has | ({"rollout"} if role == "rollout" and sleeps else set())


def features_of(context: StepContext, slots: Sequence[Slot]) -> dict[str, Any]:
    """The features of the prompts of ``slots``, from the controller's store."""
    store = context.pipeline.features
    keys = context.pipeline.encode(slots)
    found = {key: store.get(key) for key in keys}
    store.release(keys)
    return found


def split_among(micro_batches: Sequence[MicroBatch], context: StepContext, devices: int) -> list[list[MicroBatch]]:
    """Split micro-batches among devices (or groups of devices that share a model).

    The largest goes first, to the device with the least work. On each device they keep their order.

    If all ranks compute them together, each device gets the same number as every other device of all controllers; the
    missing ones are filled with micro-batches of weight 0.
    """
    loads = [sum(context.pipeline.lengths(micro_batch.rows)) for micro_batch in micro_batches]
    stages = context.policy.weights.stages
    if not (micro_batches and context.policy.weights.lockstep):
        found = [[micro_batches[n] for n in mine] for mine in greedy(loads, devices)]
        by = 1 if stages is None else stages.multiple
        return [mine + [without_weight(micro_batch) for micro_batch in mine[-1:] * (-len(mine) % by)] for mine in found]
    dealt = [[micro_batches[n] for n in mine] for mine in divide(loads, devices)]
    most = max(context.controller.gather(max(map(len, dealt))))
    return [mine + [without_weight((mine or micro_batches)[-1])] * (most - len(mine)) for mine in dealt]


def all_of(answers: Sequence[Future[Any]]) -> list[Any]:
    """The results of all. Raises the error of the first that failed: the others may be waiting for it."""
    done, _ = wait(answers, return_when=FIRST_EXCEPTION)
    for answer in done:
        answer.result()
    return [answer.result() for answer in answers]
