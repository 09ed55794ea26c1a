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
from mmrl.engines.policy import aged
from mmrl.placement import device_tasks
from mmrl.report.clock import Clock
from mmrl.rewards.scoring import Failure, RewardError
from mmrl.rollout.collect import rollout, unsampled
from mmrl.samples import make_samples
from mmrl.training.batch import MicroBatch, counted, of_group, rows_of_update
from mmrl.training.micro_batches import slices
from mmrl.training.step_context import FinishedStep, StepContext
from mmrl.training.step_metrics import Sums, Tally
from mmrl.trajectory import Trajectory


def train_step(run: StepContext, step: int, clock: Clock, spent: float = 0.0) -> tuple[dict[str, float], list[Failure]]:
    """One step of training; returns its metrics and the samples left out.

    ``spent``: the share of train.max_cpu_seconds that the steps before it took.
    """
    train = run.recipe.train
    run.devices.begin_step()
    slots = run.controller.slots(step, run.prompts, train.prompts_per_step, run.cost)
    began = worked(run)
    tally = Tally(len(slots))
    objective = run.objective
    sampled = objective.kind in ("policy_gradient", "forward_process")
    batch = rollout(run, slots, step, clock, tally) if sampled else unsampled(run, slots, clock)
    for update in range(train.updates_per_step):
        rows = rows_of_update(batch, update, train.updates_per_step)
        if objective.kind == "forward_process":
            rows = counted(batch, rows)
        total = run.controller.count(objective.amount(batch.weights[rows], batch.lengths[rows]))
        with clock("train"):
            pieces = slices(run, batch, rows, partial(run.devices.in_step, run)) if total else ()
            tally.merge(run.devices.spread(run, backward, pieces, total, step, update == 0))
            tally.check_finite()
            if update == 0:
                tally.check_first_ratio(exact=run.recipe.model.dtype == "float32")
            if total:
                tally.set(run.devices.everywhere(run, device_tasks.apply, spent))
                tally.end_update()
    if copies_of(objective):
        run.devices.everywhere(run, device_tasks.move, step)
    run.pipeline.features.release(batch.keys)
    tally.set(run.devices.end_step(run, step))
    row = tally.means(run.controller.gather)
    seconds = worked(run) - began
    for part in run.parts.values():
        row |= part.end_step(run, FinishedStep(step, batch, slots, seconds, row))
    return row, batch.failures


def worked(run: StepContext) -> float:
    """Seconds by a clock that stands still while this controller waits for others."""
    return time.perf_counter() - run.controller.peers.waited


def backward(run: StepContext, pieces: Iterable[MicroBatch], total: float, step: int, first: bool) -> Sums:
    """Add the gradients of some slices of an update of ``total`` entries; ``first``: no weight has moved yet."""
    tally = Tally()

    def loss_of(piece: MicroBatch) -> Tensor:
        new = recomputed(run, piece, step, tally)
        old = compared(run, piece.old, new, tally) if "rollout_log_probs" in piece.old else piece.old
        loss = run.objective.loss(new, old, total)
        tally.add(loss, total, first_update=first)
        if run.pipeline.makes == "text":
            tally.gather({"balance/padding": torch.tensor(piece.padded - piece.tokens)}, {}, piece.padded)
        return loss.value

    run.policy.accumulate(pieces, loss_of)
    return tally.sums()


def recomputed(run: StepContext, piece: MicroBatch, step: int, tally: Tally) -> dict[str, Tensor]:
    """What the objective needs of a slice under the weights of now, with a graph."""
    objective = run.objective
    needs = objective.needs
    match objective.kind:
        case "policy_gradient":
            known = {name: piece.old[name] for name in needs & {"reference_log_probs"} & piece.old.keys()}
            return run.pipeline.replay(piece.rows, piece.entries, needs - known.keys(), run.policy.using) | known
        case "forward_process":
            rows = of_group(piece.rows) if objective.shares_noise else piece.rows
            return run.pipeline.renoise(rows, piece.entries[0], run.recipe.seed, needs, partial(as_drawn, run))
        case "offline":
            return run.pipeline.compare(piece.rows, needs, run.policy.using)
        case "pathwise":
            return generated(run, objective, piece.rows, step, tally)


def as_drawn(run: StepContext, name: str) -> AbstractContextManager[None]:
    """``Policy.using``, but the copy that samples as it was when this step's samples were drawn."""
    if run.strategy.staleness and name in copies_of(run.objective):
        name = aged(name, run.strategy.staleness)
    return run.policy.using(name)


def compared(run: StepContext, old: dict[str, Tensor], new: dict[str, Tensor], tally: Tally) -> dict[str, Tensor]:
    """``old`` with the policy's own log-probs where they were not prepared, and weights against the engine's gap."""
    own = old.get("log_probs", new["log_probs"].detach())
    rollout = run.recipe.rollout
    same = (
        rollout.engine == "transformers" and not run.strategy.staleness
    )  # the weights that train, in the same process
    how = ("none" if same else "token") if rollout.importance == "auto" else rollout.importance
    counted = old["mask"] * old["weights"].unsqueeze(1)
    gap = mismatch(own, old["rollout_log_probs"], counted, how, rollout.importance_cap)
    tally.gather(gap.sums, gap.maxima, gap.tokens)
    return old | {"log_probs": own} | ({} if gap.weights is None else {"importance": gap.weights})


def generated(run: StepContext, objective: Pathwise, rows: Trajectory, step: int, tally: Tally) -> dict[str, Tensor]:
    """Sample ``rows`` with a graph and score them with differentiable rewards: ``rewards``, their weighted sum
    ``[P, B]`` of each of ``P`` predictions (all of them again with each further phrase), and what else the objective
    needs."""
    draw = torch.rand((), generator=generator(run.recipe.seed, step, "graph_steps")).item()
    path = objective.graph_steps(run.recipe.denoising.steps, draw)
    made = run.pipeline.generate(rows.slots, rows.ids, path, run.recipe.seed, objective.needs, run.policy.using)
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
        tally.extend(f"reward/{name}", values.detach())
    return made | {"rewards": total.view(-1, len(rows))}
