"""The step program: prompts -> trajectories -> rewards -> advantages -> update, the same for every modality.

Its only branch is the kind of objective: what is recomputed with a graph, slice by slice. Where a controller
has several devices, micro-batches and slices are theirs (``mmrl.placement.single_device``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mmrl import finite
from mmrl.algorithms.mismatch import mismatch
from mmrl.algorithms.objective import Pathwise, copies_of
from mmrl.controller.randomness import generator
from mmrl.engines.policy import snapshot_name
from mmrl.pipelines.protocol import of_pictures, pairs_of
from mmrl.placement import device_tasks
from mmrl.report.clock import Clock
from mmrl.rewards.scoring import Failure, RewardError
from mmrl.rollout.collect import collect_batch, unsampled_batch
from mmrl.rollout.importance import SCALE, correction_of
from mmrl.samples import make_samples
from mmrl.training.batch import MicroBatch, counted, of_group, rows_of_update
from mmrl.training.micro_batches import split_micro_batches
from mmrl.training.step_context import FinishedStep, StepContext
from mmrl.training.step_metrics import StepMetrics, Sums
from mmrl.trajectory import Trajectory


def train_step(
    context: StepContext, step: int, clock: Clock, spent: float = 0.0
) -> tuple[dict[str, float], list[Failure]]:
    """One step of training; returns its metrics and the samples left out.

    ``spent``: the share of train.max_cpu_seconds that the steps before it took.
    """
    train = context.recipe.train
    context.compute.devices.begin_step()
    slots = context.controller.slots(step, context.prompts, train.prompts_per_step, context.rollout.cost)
    began = busy_seconds(context)
    metrics = StepMetrics(len(slots))
    objective = context.objective
    sampled = objective.kind in ("policy_gradient", "forward_process")
    batch = (
        collect_batch(context, slots, step, clock, metrics) if sampled else unsampled_batch(context, slots, step, clock)
    )
    for update in range(train.updates_per_step):
        rows = rows_of_update(batch, update, train.updates_per_step)
        if objective.kind == "forward_process":
            rows = counted(batch, rows)
        total = context.controller.count(objective.loss_denominator(batch.weights[rows], batch.lengths[rows]))
        with clock("train"):
            micro_batches = (
                split_micro_batches(context, batch, rows, partial(context.compute.devices.in_step, context))
                if total
                else ()
            )
            metrics.merge(context.compute.devices.spread(context, backward, micro_batches, total, step, update == 0))
            metrics.check_finite()
            if update == 0:
                metrics.check_first_ratio(exact=context.recipe.model.dtype == "float32")
            if total:
                metrics.set(context.compute.devices.everywhere(context, device_tasks.apply, spent))
                metrics.end_update()
    if copies_of(objective):
        context.compute.devices.everywhere(context, device_tasks.move, step)
    context.pipeline.features.release(batch.keys)
    metrics.set(context.compute.devices.end_step(context, step))
    row = metrics.means(context.controller.gather)
    seconds = busy_seconds(context) - began
    for part in context.rollout.parts.values():
        row |= part.end_step(context, FinishedStep(step, batch, slots, seconds, row))
    return row, batch.failures


def busy_seconds(context: StepContext) -> float:
    """Seconds that this controller has worked: wall time without its waits for other controllers."""
    return time.perf_counter() - context.controller.peers.waited


def backward(context: StepContext, micro_batches: Iterable[MicroBatch], total: float, step: int, first: bool) -> Sums:
    """Accumulate the gradients of some micro-batches of an update of ``total`` entries.

    ``first``: no optimizer step was taken yet in this training step.
    """
    metrics = StepMetrics()

    def loss_of(micro_batch: MicroBatch) -> Tensor:
        new = recompute(context, micro_batch, step, metrics)
        old = micro_batch.old
        if "rollout_log_probs" in old:
            old = importance_weights(context, old, new, metrics)
        loss = context.objective.loss(new, old, total)
        metrics.add(loss, total, first_update=first)
        if context.pipeline.makes == "text":
            padding = torch.tensor(micro_batch.padded - micro_batch.tokens)
            metrics.gather({"balance/padding": padding}, {}, micro_batch.padded)
        return loss.value

    context.policy.accumulate(micro_batches, loss_of)
    return metrics.sums()


def recompute(context: StepContext, micro_batch: MicroBatch, step: int, metrics: StepMetrics) -> dict[str, Tensor]:
    """Recompute what the objective ``needs`` of this micro-batch, with autograd enabled."""
    objective = context.objective
    needs = objective.needs
    rows, entries, old = micro_batch.rows, micro_batch.entries, micro_batch.old
    match objective.kind:
        case "policy_gradient":
            known = {name: old[name] for name in needs & {"reference_log_probs"} & old.keys()}
            return context.pipeline.replay(rows, entries, needs - known.keys(), context.policy.using) | known
        case "forward_process":
            rows = of_group(rows) if objective.shares_noise else rows
            pipeline, weights = of_pictures(context.pipeline), partial(sampling_weights, context)
            return pipeline.renoise(rows, entries[0], context.recipe.seed, needs, weights)
        case "offline":
            return pairs_of(context.pipeline).compare(rows, needs, context.policy.using)
        case "pathwise":
            return pathwise_rollout(context, objective, rows, step, metrics)


def sampling_weights(context: StepContext, name: str) -> AbstractContextManager[None]:
    """``Policy.using``, but for a copy that samples: its weights when the samples of this step were drawn."""
    if context.rollout.strategy.staleness and name in copies_of(context.objective):
        name = snapshot_name(name, context.rollout.strategy.staleness)
    return context.policy.using(name)


def importance_weights(
    context: StepContext, old: dict[str, Tensor], new: dict[str, Tensor], metrics: StepMetrics
) -> dict[str, Tensor]:
    """Add importance weights to ``old``, which correct the gap between the policy and the engine that sampled.

    Where ``old`` has no log-probs of the policy, those of ``new`` are taken, detached: no weight has moved yet.
    """
    own = old.get("log_probs", new["log_probs"].detach())
    counted = old["mask"] * old["weights"].unsqueeze(1)
    scale = old[SCALE].unsqueeze(1) if SCALE in old else 1.0
    gap = mismatch(own, old["rollout_log_probs"], counted, correction_of(context), scale)
    metrics.gather(gap.sums, gap.maxima, gap.tokens)
    return old | {"log_probs": own} | ({} if gap.weights is None else {"importance": gap.weights})


def pathwise_rollout(
    context: StepContext, objective: Pathwise, rows: Trajectory, step: int, metrics: StepMetrics
) -> dict[str, Tensor]:
    """Sample ``rows`` with a graph and score them with differentiable rewards: ``rewards``, their weighted sum
    ``[P, B]`` of each of ``P`` predictions (all of them again with each further phrase), and what else the objective
    needs."""
    draw = torch.rand((), generator=generator(context.recipe.seed, step, "graph_steps")).item()
    path = objective.graph_steps(context.recipe.denoising.steps, draw)
    pipeline = of_pictures(context.pipeline)
    made = pipeline.generate(rows.slots, rows.ids, path, context.recipe.seed, objective.needs, context.policy.using)
    images, latents = made.pop("images"), made.pop("latents")
    times = len(images) // len(rows)  # a picture and what was predicted anew from it
    shown = make_samples(rows.rows(list(range(len(rows))) * times), images, context.rewards.inputs)
    phrases = objective.phrases(step) or [""]
    asked = [replace(s, prompt=replace(s.prompt, text=phrase + s.prompt.text)) for phrase in phrases for s in shown]
    try:
        parts = context.rewards.gradient_parts(asked, step=step)
    except RewardError:
        # A picture at fault is named here: asking before would be one more wait for the device.
        finite.checked_pictures(images, latents, rows.ids)
        raise
    total = context.rewards.weighted(parts)
    for name, values in {**parts, "mean": total}.items():
        metrics.extend(f"reward/{name}", values.detach())
    return made | {"rewards": total.view(-1, len(rows))}
