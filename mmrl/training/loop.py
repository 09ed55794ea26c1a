"""The step program: prompts -> trajectories -> rewards -> advantages -> update, the same for every modality.

A *slot* is a place for one prompt in a step; a *group* is the samples of one prompt; a *slice* is the part of an update
in one forward and backward pass. The program branches only on the kind of objective. ``Devices`` runs the sampling and
the gradients on one or several devices (``mmrl.placement``).

Numbers alone cross between the controllers (``context.controller``): the loss denominator of an update, the rewards
of every sample, sums for statistics over the whole batch, means of metrics; and the gradients, which
``device_tasks.apply`` sums before the optimizer step.
Prompts, samples and features stay with the controller that has the slot.

A checkpoint lies between two steps: weights, optimizer and copies of each trained model, and the state of each
``StepPart``. A resumed run begins with the next step. It draws the same prompts and the same random numbers, which
depend on the seed, the step and the sample alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mmrl.algorithms.mismatch import mismatch
from mmrl.algorithms.modality_routing import AUDIO_ADVANTAGES, loss_by_modality
from mmrl.algorithms.objective import Pathwise, copies_of
from mmrl.core import nan_check
from mmrl.core.clock import Clock
from mmrl.core.randomness import generator
from mmrl.core.samples import make_samples
from mmrl.core.trajectory import Rows
from mmrl.data.mixture import SOURCE, by_source
from mmrl.models.policy import snapshot_name
from mmrl.models.protocol import of_pictures
from mmrl.models.teachers import with_rewards
from mmrl.placement import device_tasks
from mmrl.rewards.scoring import Failure, RewardError
from mmrl.rollout.collect import collect_batch, slices, unsampled_batch
from mmrl.rollout.importance import SCALE, correction_of
from mmrl.step.batch import Batch, MicroBatch, rows_of_update, rows_with_weight
from mmrl.step.step_context import FinishedStep, StepContext
from mmrl.step.step_metrics import StepMetrics, Sums
from mmrl.step.update import recompute


def train_step(
    context: StepContext, step: int, clock: Clock, spent: float = 0.0
) -> tuple[dict[str, float], list[Failure]]:
    """Sample, score, compute advantages, update the policy. Returns the step's metrics and the samples left out.

    The update is ``train.updates_per_step`` optimizer steps, each on its share of every group; rows are divided into
    slices, whose gradients add up.

    ``spent``: the share of train.max_cpu_seconds that earlier steps have used.
    """
    devices, objective, train = context.compute.devices, context.objective, context.recipe.train
    devices.begin_step()
    slots = context.controller.slots(step, context.prompts, train.prompts_per_step, context.rollout.cost)
    began = busy_seconds(context)
    metrics = StepMetrics(len(slots))
    if objective.kind in ("policy_gradient", "forward_process"):
        batch = collect_batch(context, slots, step, clock, metrics)
    else:  # pathwise objectives sample in the update, offline ones train on given pairs
        batch = unsampled_batch(context, slots, step, clock)
    for update in range(train.updates_per_step):
        optimizer_step(context, batch, step, update, spent, clock, metrics)
    if copies_of(objective):
        devices.run_on_trainers(context, device_tasks.update_copies, step)
    context.pipeline.features.release(batch.keys)
    metrics.set(devices.end_step(context, step))
    row = metrics.means(context.controller.gather)
    seconds = busy_seconds(context) - began
    for part in context.rollout.parts.values():
        row |= part.end_step(context, FinishedStep(step, batch, batch.slots or slots, seconds, row))
    return row, batch.failures


def optimizer_step(
    context: StepContext, batch: Batch, step: int, update: int, spent: float, clock: Clock, metrics: StepMetrics
) -> None:
    """Accumulate the gradients of the rows of optimizer step ``update`` of this training step, and apply them."""
    devices = context.compute.devices
    rows = rows_of_update(batch, update, context.recipe.train.updates_per_step)
    if context.objective.kind == "forward_process" or context.recipe.algorithm.trains_few:
        rows = rows_with_weight(batch, rows, whole=context.recipe.algorithm.whole == "group")
    # Over all controllers: each slice's loss is divided by it, so that the slices' gradients add up.
    total = context.controller.count(context.objective.loss_denominator(batch.weights[rows], batch.lengths[rows]))
    with clock("train"):
        micro_batches = slices(context, batch, rows) if total else ()
        sums = devices.map_micro_batches(context, backward, micro_batches, total, step, update == 0)
        metrics.merge(sums)
        metrics.check_finite()
        if update == 0:
            exact = context.recipe.model.dtype == "float32"
            metrics.check_first_ratio(exact=exact)
            rollout, fresh = context.recipe.rollout, not context.rollout.strategy.staleness
            if rollout.max_gap is not None and rollout.in_process and rollout.partial is None and fresh:
                metrics.check_gap(rollout.max_gap, exact=exact)
        if total:
            metrics.set(devices.run_on_trainers(context, device_tasks.apply, spent))
            metrics.updates += 1


def busy_seconds(context: StepContext) -> float:
    """Wall time in seconds without the waits for other controllers; only differences are meaningful."""
    return time.perf_counter() - context.controller.peers.waited


def backward(context: StepContext, micro_batches: Iterable[MicroBatch], total: float, step: int, first: bool) -> Sums:
    """Accumulate the gradients of this device's slices of an update. Returns their sums for the step's metrics.

    ``total``: the loss denominator of the whole update. ``first``: whether this is the step's first optimizer step.
    """
    metrics = StepMetrics()

    def loss_of(micro_batch: MicroBatch) -> Tensor:
        new = computed(context, micro_batch, step, metrics)
        old = micro_batch.old
        if "rollout_log_probs" in old:
            old = importance_weights(context, old, new, metrics)
        if "teacher_kl" in new:
            by_lesson(context, micro_batch, new["teacher_kl"].detach(), metrics)
        if AUDIO_ADVANTAGES in old:
            split = of_pictures(context.pipeline).modalities
            loss = loss_by_modality(context.objective, new, old, total, split)
        else:
            loss = context.objective.loss(new, old, total)
        metrics.add(loss, total, first_update=first)
        if context.pipeline.makes == "text":
            padding = torch.tensor(micro_batch.padded - micro_batch.tokens)
            metrics.gather({"balance/padding": padding}, {}, micro_batch.padded)
        return loss.value

    context.policy.accumulate(micro_batches, loss_of)
    return metrics.sums()


def by_lesson(context: StepContext, micro_batch: MicroBatch, kl: Tensor, metrics: StepMetrics) -> None:
    """Add the divergence ``[B, T]`` from the teachers of each source, mean over its tokens or denoising steps."""
    sources = by_source([slot.prompt for slot in micro_batch.rows.slots], context.recipe.data.labels)
    counted = micro_batch.old["weights"].unsqueeze(1) * micro_batch.old.get("mask", torch.ones_like(kl))
    for label, of in sources.items():
        metrics.gather({f"{SOURCE}{label}/teacher/kl": (kl * counted)[of].sum()}, {}, counted[of].sum())


def computed(context: StepContext, micro_batch: MicroBatch, step: int, metrics: StepMetrics) -> dict[str, Tensor]:
    """Compute what the objective ``needs`` of this slice with the current weights and an autograd graph: log-probs
    (policy gradient), velocities (forward process), log-probs of given pairs (offline), or rewards (pathwise)."""
    objective, rows = context.objective, micro_batch.rows
    if objective.kind == "pathwise":
        return pathwise_rollout(context, objective, rows, step, metrics)
    known = {name: micro_batch.old[name] for name in objective.needs & {"reference_log_probs"} & micro_batch.old.keys()}
    needs, weights = objective.needs - known.keys(), partial(sampling_weights, context)
    seed, entries = context.recipe.seed, micro_batch.entries
    new = recompute(context.pipeline, objective, rows, entries, needs, seed, weights) | known
    if any(teacher.reward for teacher in context.recipe.teacher):
        return with_rewards(context.recipe, rows.slots, new, micro_batch.old)
    return new


def sampling_weights(context: StepContext, name: str) -> AbstractContextManager[None]:
    """A context in which the policy has the weights called ``name`` (``Policy.using``). Where a copy samples ahead of
    training (``staleness``), these are the snapshot that sampled for this step."""
    if context.rollout.strategy.staleness and name in copies_of(context.objective):
        name = snapshot_name(name, context.rollout.strategy.staleness)
    return context.policy.using(name)


def importance_weights(
    context: StepContext, old: dict[str, Tensor], new: dict[str, Tensor], metrics: StepMetrics
) -> dict[str, Tensor]:
    """Add truncated importance weights to ``old``: they correct the mismatch between the policy that trains and the
    engine (or the older weights) that sampled.

    If ``old`` has no log-probs of the policy, the detached ``new`` ones are used: the only update of this step has not
    changed a weight yet (older weights may have sampled).
    """
    own = old.get("log_probs", new["log_probs"].detach())
    counted = old["mask"] * old["weights"].unsqueeze(1)
    scale = old[SCALE].unsqueeze(1) if SCALE in old else 1.0
    gap = mismatch(own, old["rollout_log_probs"], counted, correction_of(context), scale)
    metrics.gather(gap.sums, gap.maxima, gap.tokens)
    return old | {"log_probs": own} | ({} if gap.weights is None else {"importance": gap.weights})


def pathwise_rollout(
    context: StepContext, objective: Pathwise, rows: Rows, step: int, metrics: StepMetrics
) -> dict[str, Tensor]:
    """Sample ``rows`` with an autograd graph and score the pictures with differentiable rewards.

    Returns ``rewards`` ``[P, B]``, the weighted sum of the rewards of each of ``P`` predicted pictures per row (times
    the number of the objective's phrases), and the other tensors that the objective needs.
    """
    draw = torch.rand((), generator=generator(context.recipe.seed, step, "graph_steps")).item()
    path = objective.graph_steps(context.recipe.denoising.taken, draw)
    pipeline = of_pictures(context.pipeline)
    made = pipeline.generate(rows.slots, rows.ids, path, context.recipe.seed, objective.needs, context.policy.using)
    images, latents = made.pop("images"), made.pop("latents")
    times = len(images) // len(rows)  # the sampled picture, and those predicted from it
    shown = make_samples(rows.rows(list(range(len(rows))) * times), images, context.rewards.inputs)
    phrases = objective.phrases(step) or [""]
    asked = [replace(s, prompt=replace(s.prompt, text=phrase + s.prompt.text)) for phrase in phrases for s in shown]
    try:
        parts = context.rewards.gradient_parts(asked, step=step)
    except RewardError:
        # Check pictures only after an error: an earlier check would synchronise with the device once more.
        nan_check.checked_pictures(images, latents, rows.ids)
        raise
    total = context.rewards.weighted(parts)
    sources = by_source([sample.prompt for sample in shown], context.recipe.data.labels)
    for name, values in {**parts, "mean": total}.items():
        metrics.extend(f"reward/{name}", values.detach())
        for label, of in sources.items():
            metrics.extend(f"{SOURCE}{label}/reward/{name}", values.detach()[of])
    return made | {"rewards": total.view(-1, len(rows))}
