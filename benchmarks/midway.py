"""How well rewards of predicted results rank the final ones, and what pruning by them gives, for each denoising step.

    python benchmarks/midway.py [RECIPE] [--prompts 32] [--begun 24] [--keep 12] [key=value ...]

Samples groups of ``--begun`` with the model as it is, without training. For every step it scores the predicted results
and the finished ones, and prints:

- rank: Spearman's correlation of predicted and final rewards in a group, mean over the groups where both differ;
- kept: standard deviation (mean over groups) of the final rewards of the ``--keep`` samples that ``midway`` would keep;
- first: the same of the first ``--keep`` samples (no pruning); best: of those it would keep if it knew the final ones;
- flat: share of groups whose kept samples all have the same final reward;
- steps: denoising steps of single samples for a prompt, relative to no pruning.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from torch import Tensor

from mmrl.config.loader import load_recipe
from mmrl.pipelines.protocol import of_pictures, recorded_steps
from mmrl.rollout.midway import chosen, rank_correlation
from mmrl.run import build
from mmrl.training.step_context import StepContext
from mmrl.trajectory import SampleId, Slot, Trajectory


def scored(run: StepContext, trajectory: Trajectory) -> Tensor:
    """The total reward of each sample, ``[B]``."""
    samples = run.pipeline.samples(trajectory, run.rewards.inputs)
    return run.rewards.score(samples, [range(len(samples))]).total


def group(run: StepContext, number: int, begun: int, steps: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
    """One group: the rewards predicted after each of ``steps``, and the final ones, ``[begun]`` each."""
    slots = [Slot(0, number, 0, run.prompts[number])] * begun
    ids = [SampleId(0, number, 0, k) for k in range(begun)]
    run.pipeline.encode(slots[:1])
    pipeline = of_pictures(run.pipeline)
    actions = recorded_steps(run.pipeline, 0) if "log_probs" in run.objective.needs else []
    predicted = {at: scored(run, pipeline.begin(slots, ids, actions, run.recipe.seed, at)) for at in steps}
    return predicted, scored(run, pipeline.sample(slots, ids, actions, run.recipe.seed))


def line(at: int, groups: Sequence[tuple[dict[int, Tensor], Tensor]], keep: int, total: int) -> str:
    """The row of the table for pruning after ``at`` steps."""
    ranks, kept, plain, best, flat = [], [], [], [], 0
    for predicted, final in groups:
        rank = rank_correlation(predicted[at], final)
        ranks += [] if rank is None else [rank]
        one = final[chosen(predicted[at], keep, "spread")]
        flat += int(one.max() == one.min())
        kept.append(one.std(correction=0).item())
        plain.append(final[:keep].std(correction=0).item())
        best.append(final[chosen(final, keep, "spread")].std(correction=0).item())
    begun = len(groups[0][1])
    work = (begun * (at + 1) + keep * (total - at - 1)) / (keep * total)
    shown = f"{statistics.mean(ranks):6.2f}" if ranks else "     -"
    spread = "  ".join(f"{statistics.mean(of):6.3f}" for of in (kept, plain, best))
    return f"{at:4d}  {shown}  {spread}  {flat / len(groups):5.2f}  {work:5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="shapes-lora")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--begun", type=int, default=24)
    parser.add_argument("--keep", type=int, default=12)
    given, changes = parser.parse_known_args()
    loaded = load_recipe([given.recipe], changes)
    run = build(loaded.recipe, loaded.root)
    total = loaded.recipe.denoising.steps
    steps = range(1, total)
    groups = [group(run, n, given.begun, steps) for n in range(given.prompts)]
    plain = sum(int(final[: given.keep].max() == final[: given.keep].min()) for _, final in groups)
    print(f"{given.recipe}: {given.prompts} groups of {given.begun}, {given.keep} kept, {total} denoising steps")
    print(f"without pruning {plain / len(groups):.2f} of the groups are flat")
    print("step    rank    kept   first    best   flat  steps")
    for at in steps:
        print(line(at, groups, given.keep, total))


if __name__ == "__main__":
    main()
