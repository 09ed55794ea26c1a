"""Measure ``train.steps_per_forward``: seconds of an update's slices with one or several recorded steps per forward.

    OMP_NUM_THREADS=1 python benchmarks/stacked_steps.py shapes-full [OVERRIDE ...] [--repeats 9]

Arms take turns on the same samples and weights, which no update moves. Ratios are taken within a repeat.
"""

from __future__ import annotations

import argparse

import stepping
import torch
from stepping import CPU, JPEG, Arm

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.rollout.collect import collect_batch
from mmrl.step.batch import Batch, rows_of_update
from mmrl.step.micro_batches import split_micro_batches
from mmrl.step.step_context import StepContext
from mmrl.step.step_metrics import StepMetrics
from mmrl.training.loop import backward


def slices_with(context: StepContext, batch: Batch, at_once: int, seen: dict[int, tuple[torch.Tensor, float]]) -> Arm:
    """The arm of ``at_once`` steps a forward; leaves its gradient and how far a first ratio was off in ``seen``."""
    train = context.recipe.train.model_copy(update={"steps_per_forward": at_once})
    recipe = context.recipe.model_copy(update={"train": train})
    rows = rows_of_update(batch, 0, 1)
    total = context.objective.loss_denominator(batch.weights[rows], batch.lengths[rows])

    def iterate(step: int, clock: Clock) -> None:
        object.__setattr__(context, "recipe", recipe)  # of a frozen record, for a measurement
        for p in context.policy.trainable.values():
            p.grad = None
        metrics = StepMetrics(1)
        with clock("train"):
            metrics.merge([backward(context, split_micro_batches(context, batch, rows), total, 0, True)])
        found = [p.grad.flatten() for p in context.policy.trainable.values() if p.grad is not None]
        seen[at_once] = torch.cat(found), metrics.means(context.controller.gather)["policy/first_ratio_max_dev"]

    return iterate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    loaded = load_recipe([arguments.recipe], [JPEG, *arguments.overrides])
    run = build(loaded.recipe)
    slots = run.controller.slots(0, run.prompts, loaded.recipe.train.prompts_per_step)
    batch = collect_batch(run, slots, 0, Clock(CPU), StepMetrics(len(slots)))
    most = run.objective.entries or run.pipeline.entries(run.objective.kind)
    seen: dict[int, tuple[torch.Tensor, float]] = {}
    made = {str(k): slices_with(run, batch, k, seen) for k in sorted({1, min(2, most), most})}
    for arm in made.values():
        arm(0, Clock(CPU))
    rows = stepping.measure(made, arguments.repeats)
    one = seen[1][0]
    for name in made:
        gap, ratio = (seen[int(name)][0] - one).norm() / one.norm(), seen[int(name)][1]
        over = [x["cpu"] / y["cpu"] for x, y in zip(rows[name], rows["1"], strict=True)]
        print(
            f"{name} a forward: {stepping.spread([row['total'] for row in rows[name]])} s, processor time over one's "
            f"{stepping.spread(over)}; gradient off by {gap:.1e}, first ratio by {ratio:.1e}"
        )


if __name__ == "__main__":
    main()
