"""Ask a recipe's judge about samples of the recipe's own policy, or of a run's: what students are trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from mmrl.algorithms.objective import sampler
from mmrl.config.schema import Recipe, Reward
from mmrl.controller import Controller
from mmrl.controller.randomness import seed_of
from mmrl.errors import UserError
from mmrl.pipelines.protocol import recorded_steps
from mmrl.report.clock import Clock
from mmrl.report.progress import Progress
from mmrl.rollout.encoding import encode
from mmrl.rollout.midway import chunked
from mmrl.run import build, find_checkpoint, open_run
from mmrl.training.batch import samples_of
from mmrl.training.step_context import SamplingSpec, StepContext
from mmrl.trajectory import Sample, Slot


@dataclass(frozen=True)
class Verdicts:
    """Samples of one prompt after another, each with the judge's verdict in [0, 1].

    ``groups``: for each sample the number of its group, whose samples have the same prompt. ``failed``: how many more
    samples the judge could not score, and the first reason.
    """

    samples: list[Sample]
    values: list[float]
    groups: list[int]
    failed: int = 0
    reason: str = ""


def open_policy(recipe: Recipe, judge: Reward, run: Path | None, checkpoint: str) -> StepContext:
    """The policy with the judge as its only reward; ``run``: with the weights of a checkpoint of this run.

    Raises ``UserError``.
    """
    if recipe.algorithm.kind == "offline":
        raise UserError(
            f"algorithm.type: {recipe.algorithm.label} trains on given data, so there are no samples to ask the judge "
            "about; name a recipe with an algorithm that samples, such as grpo or flow_grpo"
        )
    alone = judge.model_copy(update={"weight": 1.0, "normalize": "none", "on_failure": "drop"})
    evaluation = recipe.eval.model_copy(update={"rewards": []})
    context = build(recipe.model_copy(update={"rewards": [alone], "eval": evaluation}))
    if run is not None:
        found = find_checkpoint(open_run(run)[1], checkpoint)
        if found is not None:
            found.into("policy", context.policy.load_state_dict)
    return context


def collect(context: StepContext, samples: int, folder: Path, start: int = 0) -> Verdicts:
    """Sample ``samples`` samples as training does, in groups, and ask the judge; ``folder`` keeps its verdicts.

    Prompts and noise are not those of a run with the recipe's seed: what a run samples later is new to the students.
    ``start``: how many groups were drawn before, so that these are others. Raises ``UserError`` where the
    judge gives no verdict at all.
    """
    recipe, size = context.recipe, context.recipe.train.group_size
    context.rewards.folder = folder
    seed = seed_of(recipe.seed, "distill")
    controller = Controller(seed)
    per_step = recipe.train.prompts_per_step
    count = max(1, math.ceil(samples / size))
    made = Verdicts([], [], [])
    reasons: list[str] = []
    with Progress(count, "ask the judge", "groups") as progress:
        for first in range(start, start + count, per_step):
            indices = range(first, min(first + per_step, start + count))
            slots = controller.slots_at(indices, 0, context.prompts, per_step)
            found, values, why = _judged(context, controller, slots, seed)
            reasons += why
            for n, sample in enumerate(found):
                if math.isfinite(values[n]):
                    made.samples.append(sample)
                    made.values.append(values[n])
                    made.groups.append(first + n // size)
            progress.advance(len(indices))
    if not made.values:
        said = f": {reasons[0]}" if reasons else ""
        raise UserError(f"the judge gave no verdict for {count * size} samples, so there is nothing to distil{said}")
    return Verdicts(made.samples, made.values, made.groups, len(reasons), reasons[0] if reasons else "")


def _judged(
    context: StepContext, controller: Controller, slots: list[Slot], seed: int
) -> tuple[list[Sample], list[float], list[str]]:
    """The samples of ``slots``, group after group, their verdicts (NaN where there is none), and why there is none."""
    size = context.recipe.train.group_size
    slots, keys, _ = encode(context, slots, lambda slot, n: controller.replacement(slot, n, context.prompts))
    actions = recorded_steps(context.pipeline, 0) if "log_probs" in context.objective.needs else []
    weights = sampler(context.objective, 0)
    how = SamplingSpec(actions, weights, seed, context.rewards.inputs, step=0)
    chunks, places = chunked(context, samples_of(slots, size))
    made: dict[int, Sample] = {}
    devices = context.compute.devices
    with devices.sampling_phase(context, weights), torch.no_grad():
        for n, _, samples in devices.sample(context, chunks, how, Clock(context.compute.device)):
            made |= zip(places[n], samples, strict=True)
    context.pipeline.features.release(keys)
    whole = [made[n] for n in range(len(made))]
    groups = [list(range(n, n + size)) for n in range(0, len(whole), size)]
    scores = context.rewards.score(whole, groups)
    return whole, scores.total.tolist(), [failure.reason for failure in scores.failures]
