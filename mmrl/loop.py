"""The step program: prompts -> trajectories -> rewards -> advantages -> update, the same for every modality.

Its only branch is the kind of objective (DESIGN 2): what is recomputed with a graph, slice by slice, so that no more
than one slice's graph is ever held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from mmrl.algorithms.advantages import group_advantages
from mmrl.algorithms.objective import Objective
from mmrl.config.schema import Recipe
from mmrl.controller import Controller
from mmrl.engines.policy import Policy
from mmrl.pipelines.protocol import Pipeline
from mmrl.report.clock import Clock
from mmrl.rewards.scoring import Failure, RewardSet, Scores
from mmrl.samples import make_samples
from mmrl.tally import Tally
from mmrl.trajectory import Prompt, SampleId, Slot, Trajectory

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """What a step works with; built once by ``mmrl.run``."""

    recipe: Recipe
    controller: Controller
    pipeline: Pipeline
    policy: Policy
    objective: Objective
    rewards: RewardSet
    prompts: Sequence[Prompt]


@dataclass
class Batch:
    """The samples of a step on this controller: micro-batches as they were sampled, and a value per row."""

    micro_batches: list[Trajectory]
    advantages: Tensor
    weights: Tensor
    failures: list[Failure] = field(default_factory=list)

    @property
    def ids(self) -> list[SampleId]:
        return [sample for trajectory in self.micro_batches for sample in trajectory.ids]


def train_step(run: Run, step: int, clock: Clock) -> tuple[dict[str, float], list[Failure]]:
    """One step of training; returns its metrics and the samples left out."""
    train, seed = run.recipe.train, run.recipe.seed
    tally = Tally()
    slots = run.controller.slots(step, run.prompts, train.prompts_per_step)
    with clock("encode"):
        keys = run.pipeline.encode(slots)
    batch = unsampled(run, slots) if run.objective.kind == "pathwise" else rollout(run, slots, step, clock, tally)
    for update in range(train.updates_per_step):
        rows = rows_of_update(batch, update, train.updates_per_step)
        total = run.controller.total(float(batch.weights[rows].sum()) * entries(run))
        with clock("train"):
            for piece in slices(run, batch, rows) if total else ():
                match run.objective.kind:
                    case "policy_gradient":
                        new = run.pipeline.replay(piece.rows, piece.entry, run.objective.needs, run.policy.using)
                    case "forward_process":
                        new = run.pipeline.renoise(piece.rows, piece.entry, seed, run.objective.needs, run.policy.using)
                    case "pathwise":
                        new = {"rewards": rewards_of(run, piece.rows, step, tally)}
                loss = run.objective.loss(new, piece.old, total)
                run.policy.backward(loss.value)
                tally.add(loss, total, first_update=update == 0)
            if update == 0:
                tally.check_first_ratio(exact=run.recipe.model.dtype == "float32")
            if total:
                tally.set(run.policy.apply())
                tally.end_update()
    for name, decay in run.objective.copies.items():
        run.policy.move(name, decay(step))
    run.pipeline.features.release(keys)
    return tally.means(), batch.failures


def rollout(run: Run, slots: list[Slot], step: int, clock: Clock, tally: Tally) -> Batch:
    """Sample a group for every slot, score it, and turn rewards into advantages."""
    rows = samples_of(slots, run.recipe.train.group_size)
    actions = run.pipeline.noisy_steps(step) if "log_probs" in run.objective.needs else []
    micro_batches, samples = [], []
    with run.policy.using(run.objective.samples_with):
        for chunk in chunks(rows, run.recipe.sampling.batch_size or run.recipe.train.micro_batch_size):
            with clock("sample"):
                trajectory = run.pipeline.sample([s for s, _ in chunk], [i for _, i in chunk], actions, run.recipe.seed)
            with clock("decode"):
                samples += make_samples(trajectory, run.pipeline.images(trajectory), run.rewards.inputs)
            micro_batches.append(trajectory)
    with clock("reward"):
        groups = torch.arange(len(slots)).repeat_interleave(run.recipe.train.group_size)
        scores = run.rewards.score(
            samples, [g.tolist() for g in groups.argsort(stable=True).chunk(len(slots))], step=step
        )
    advantages = group_advantages(scores.total, groups, run.objective.advantage_std)
    tally.set(reward_metrics(scores))
    tally.set({"advantage/zero_std_groups": advantages.zero_std_groups / advantages.groups})
    return Batch(micro_batches, advantages.values, advantages.valid.float(), scores.failures)


def unsampled(run: Run, slots: list[Slot]) -> Batch:
    """The rows of a pathwise step, which samples inside its update."""
    rows = samples_of(slots, run.recipe.train.group_size)
    empty = torch.empty(len(rows), 0)
    trajectory = Trajectory([s for s, _ in rows], [i for _, i in rows], empty, [s.prompt.text for s, _ in rows])
    return Batch([trajectory], torch.zeros(len(rows)), torch.ones(len(rows)))


def rewards_of(run: Run, rows: Trajectory, step: int, tally: Tally) -> Tensor:
    """Sample ``rows`` with a graph and score them with differentiable rewards: their weighted sum ``[B]``."""
    images = run.pipeline.generate(rows.slots, rows.ids, run.objective.last_steps, run.recipe.seed)
    parts = run.rewards.gradient_parts(make_samples(rows, images, run.rewards.inputs), step=step)
    total = run.rewards.weighted(parts)
    for name, values in {**parts, "mean": total}.items():
        tally.extend(f"reward/{name}", values.detach())
    return total


@dataclass(frozen=True)
class Piece:
    """The slice of an update whose graph is held at once: some rows and one of their entries (actions, levels)."""

    rows: Trajectory
    entry: int
    old: dict[str, Tensor]


def rows_of_update(batch: Batch, update: int, updates: int) -> list[int]:
    """Of every group, the samples whose turn it is: each update sees all prompts."""
    return [n for n, sample in enumerate(batch.ids) if sample.sample % updates == update]


def entries(run: Run) -> int:
    """How many entries (actions, noise levels) of each sample an update goes through."""
    return run.objective.entries or run.pipeline.entries(run.objective.kind)


def slices(run: Run, batch: Batch, mine: list[int]) -> Iterator[Piece]:
    """The slices of one optimizer step over the rows ``mine``: micro-batches of them, entry by entry."""
    device = batch.micro_batches[0].clean.device
    places = [(m, i) for m, sampled in enumerate(batch.micro_batches) for i in range(len(sampled))]
    for index in chunks(mine, run.recipe.train.micro_batch_size):
        rows = gather(batch.micro_batches, [places[n] for n in index])
        old = {"advantages": batch.advantages[index].to(device), "weights": batch.weights[index].to(device)}
        for entry in range(entries(run)):
            yield Piece(rows, entry, old | run.pipeline.recorded(rows, entry))


def gather(micro_batches: list[Trajectory], places: list[tuple[int, int]]) -> Trajectory:
    """The rows at ``(micro-batch, row)``; a whole micro-batch is itself, so that its replay has its very shape."""
    first = micro_batches[places[0][0]]
    if len(places) == len(first) and all(m == places[0][0] for m, _ in places):
        return first
    parts = [micro_batches[m].rows([i for n, i in places if n == m]) for m in dict.fromkeys(m for m, _ in places)]
    return Trajectory.join(parts)


def samples_of(slots: list[Slot], size: int) -> list[tuple[Slot, SampleId]]:
    """The samples of every slot's group, groups contiguous."""
    return [(slot, SampleId(slot.step, slot.index, slot.attempt, k)) for slot in slots for k in range(size)]


def chunks(rows: list[T], size: int) -> Iterator[list[T]]:
    """``rows`` in runs of ``size``, the last one shorter."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def reward_metrics(scores: Scores) -> dict[str, float]:
    """Mean and spread of the total, the mean of every part, and how many samples were left out."""
    valid = scores.total[scores.total.isfinite()]
    out = {f"reward/{name}": value[value.isfinite()].mean().item() for name, value in scores.parts.items()}
    out["reward/mean"] = valid.mean().item()
    out["reward/std"] = (valid - valid.mean()).square().mean().sqrt().item()
    out["reward/dropped"] = float(len(scores.total) - len(valid))
    return out
