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
from mmrl.algorithms.mismatch import Correction, mismatch
from mmrl.algorithms.objective import Pathwise, copies_of
from mmrl.controller.randomness import generator
from mmrl.engines.policy import snapshot_name
from mmrl.pipelines.protocol import of_pictures, pairs_of
from mmrl.placement import device_tasks
from mmrl.report.clock import Clock
from mmrl.rewards.scoring import Failure, RewardError
from mmrl.rollout.collect import collect_batch, unsampled_batch
from mmrl.samples import make_samples
from mmrl.training.batch import MicroBatch, counted, of_group, rows_of_update
from mmrl.training.micro_batches import split_micro_batches
from mmrl.training.step_context import FinishedStep, StepContext
from mmrl.training.step_metrics import StepMetrics, Sums
from mmrl.trajectory import Trajectory


def train_step(run: StepContext, step: int, clock: Clock, spent: float = 0.0) -> tuple[dict[str, float], list[Failure]]:
    """One step of training; returns its metrics and the samples left out.

    ``spent``: the share of train.max_cpu_seconds that the steps before it took.
    """
    train = run.recipe.train
    run.devices.begin_step()
    slots = run.controller.slots(step, run.prompts, train.prompts_per_step, run.cost)
    began = busy_seconds(run)
    metrics = StepMetrics(len(slots))
    objective = run.objective
    sampled = objective.kind in ("policy_gradient", "forward_process")
    batch = collect_batch(run, slots, step, clock, metrics) if sampled else unsampled_batch(run, slots, clock)
    for update in range(train.updates_per_step):
        rows = rows_of_update(batch, update, train.updates_per_step)
        if objective.kind == "forward_process":
            rows = counted(batch, rows)
        total = run.controller.count(objective.loss_denominator(batch.weights[rows], batch.lengths[rows]))
        with clock("train"):
            micro_batches = split_micro_batches(run, batch, rows, partial(run.devices.in_step, run)) if total else ()
            metrics.merge(run.devices.spread(run, backward, micro_batches, total, step, update == 0))
            metrics.check_finite()
            if update == 0:
                metrics.check_first_ratio(exact=run.recipe.model.dtype == "float32")
            if total:
                metrics.set(run.devices.everywhere(run, device_tasks.apply, spent))
                metrics.end_update()
    if copies_of(objective):
        run.devices.everywhere(run, device_tasks.move, step)
    run.pipeline.features.release(batch.keys)
    metrics.set(run.devices.end_step(run, step))
    row = metrics.means(run.controller.gather)
    seconds = busy_seconds(run) - began
    for part in run.parts.values():
        row |= part.end_step(run, FinishedStep(step, batch, slots, seconds, row))
    return row, batch.failures


def busy_seconds(run: StepContext) -> float:
    """Seconds that this controller has worked: wall time without its waits for other controllers."""
    return time.perf_counter() - run.controller.peers.waited


def backward(run: StepContext, micro_batches: Iterable[MicroBatch], total: float, step: int, first: bool) -> Sums:
    """Accumulate the gradients of some micro-batches of an update of ``total`` entries.

    ``first``: no optimizer step was taken yet in this training step.
    """
    metrics = StepMetrics()

    def loss_of(micro_batch: MicroBatch) -> Tensor:
        new = recompute(run, micro_batch, step, metrics)
        old = micro_batch.old
        if "rollout_log_probs" in old:
            old = importance_weights(run, old, new, metrics)
        loss = run.objective.loss(new, old, total)
        metrics.add(loss, total, first_update=first)
        if run.pipeline.makes == "text":
            padding = torch.tensor(micro_batch.padded - micro_batch.tokens)
            metrics.gather({"balance/padding": padding}, {}, micro_batch.padded)
        return loss.value

    run.policy.accumulate(micro_batches, loss_of)
    return metrics.sums()


def recompute(run: StepContext, micro_batch: MicroBatch, step: int, metrics: StepMetrics) -> dict[str, Tensor]:
    """Recompute what the objective ``needs`` of this micro-batch, with autograd enabled."""
    objective = run.objective
    needs = objective.needs
    rows, entries, old = micro_batch.rows, micro_batch.entries, micro_batch.old
    match objective.kind:
        case "policy_gradient":
            known = {name: old[name] for name in needs & {"reference_log_probs"} & old.keys()}
            return run.pipeline.replay(rows, entries, needs - known.keys(), run.policy.using) | known
        case "forward_process":
            rows = of_group(rows) if objective.shares_noise else rows
            pipeline, weights = of_pictures(run.pipeline), partial(sampling_weights, run)
            return pipeline.renoise(rows, entries[0], run.recipe.seed, needs, weights)
        case "offline":
            return pairs_of(run.pipeline).compare(rows, needs, run.policy.using)
        case "pathwise":
            return pathwise_rollout(run, objective, rows, step, metrics)


def sampling_weights(run: StepContext, name: str) -> AbstractContextManager[None]:
    """``Policy.using``, but for a copy that samples: its weights when the samples of this step were drawn."""
    if run.strategy.staleness and name in copies_of(run.objective):
        name = snapshot_name(name, run.strategy.staleness)
    return run.policy.using(name)


def importance_weights(
    run: StepContext, old: dict[str, Tensor], new: dict[str, Tensor], metrics: StepMetrics
) -> dict[str, Tensor]:
    """Add importance weights to ``old``, which correct the gap between the policy and the engine that sampled.

    Where ``old`` has no log-probs of the policy, those of ``new`` are taken, detached: no weight has moved yet.
    """
    own = old.get("log_probs", new["log_probs"].detach())
    rollout = run.recipe.rollout
    # The weights that train also sampled, in the same process.
    same = rollout.engine == "transformers" and not run.strategy.staleness
    how = ("none" if same else "token") if rollout.importance == "auto" else rollout.importance
    counted = old["mask"] * old["weights"].unsqueeze(1)
    correction = Correction(
        how, rollout.importance_cap, rollout.importance_floor, rollout.importance_mode, rollout.rejection
    )
    gap = mismatch(own, old["rollout_log_probs"], counted, correction)
    metrics.gather(gap.sums, gap.maxima, gap.tokens)
    return old | {"log_probs": own} | ({} if gap.weights is None else {"importance": gap.weights})


def pathwise_rollout(
    run: StepContext, objective: Pathwise, rows: Trajectory, step: int, metrics: StepMetrics
) -> dict[str, Tensor]:
    """Sample ``rows`` with a graph and score them with differentiable rewards: ``rewards``, their weighted sum
    ``[P, B]`` of each of ``P`` predictions (all of them again with each further phrase), and what else the objective
    needs."""
    draw = torch.rand((), generator=generator(run.recipe.seed, step, "graph_steps")).item()
    path = objective.graph_steps(run.recipe.denoising.steps, draw)
    pipeline = of_pictures(run.pipeline)
    made = pipeline.generate(rows.slots, rows.ids, path, run.recipe.seed, objective.needs, run.policy.using)
    images, latents = made.pop("images"), made.pop("latents")
    times = len(images) // len(rows)  # a picture and what was predicted anew from it
    shown = make_samples(rows.rows(list(range(len(rows))) * times), images, run.rewards.inputs)
    phrases = objective.phrases(step) or [""]
    asked = [replace(s, prompt=replace(s.prompt, text=phrase + s.prompt.text)) for phrase in phrases for s in shown]
    try:
        parts = run.rewards.gradient_parts(asked, step=step)
    except RewardError:
        # A picture at fault is named here: asking before would be one more wait for the device.
        finite.checked_pictures(images, latents, rows.ids)
        raise
    total = run.rewards.weighted(parts)
    for name, values in {**parts, "mean": total}.items():
        metrics.extend(f"reward/{name}", values.detach())
    return made | {"rewards": total.view(-1, len(rows))}
