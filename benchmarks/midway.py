"""How well rewards in the middle of sampling rank the final ones, and what pruning by them gives, for each step.

    python benchmarks/midway.py [RECIPE] [--prompts 32] [--begun 24] [--keep 12] [--rule spread] [key=value ...]

Samples groups of ``--begun`` with the model as it is, without training. For every denoising step (of text: for every
fourth token, or ``--every``) it scores the predicted results or the partial responses, and the finished ones. Prints:

- rank: Spearman's correlation of these rewards and the final ones in a group, mean over the groups where both differ;
- kept: standard deviation (mean over groups) of the final rewards of the ``--keep`` samples that ``midway`` would keep;
- first: the same of the first ``--keep`` samples (no pruning); best: of those it would keep if it knew the final ones;
- shift: mean final reward of the kept samples minus that of all begun ones, mean over groups;
- flat: share of groups whose kept samples all have the same final reward;
- steps: denoising steps, or tokens, of single samples for a prompt, relative to no pruning;
- cut: of the tokens that all begun responses have at the end, the share that pruning does not draw (text).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mmrl.config.loader import load_recipe
from mmrl.pipelines.protocol import recorded_steps
from mmrl.planner.counts import forwards_of_a_sample
from mmrl.rollout.midway import chosen, rank_correlation
from mmrl.run import build
from mmrl.training.step_context import StepContext
from mmrl.trajectory import SampleId, Slot, Trajectory

Rule = Literal["spread", "extremes", "best"]


def scored(run: StepContext, trajectory: Trajectory, labels: Sequence[str] = ()) -> Tensor:
    """The total reward of each sample, ``[B]``; ``labels``: the sum of these rewards."""
    samples = run.pipeline.samples(trajectory, run.rewards.inputs)
    found = run.rewards.score(samples, [range(len(samples))])
    return torch.stack([found.parts[label] for label in labels]).sum(0) if labels else found.total


@dataclass(frozen=True)
class Group:
    """One group: the rewards in the middle, after each number of steps, and the final ones, ``[begun]`` each; of text
    the lengths of the whole responses."""

    partial: dict[int, Tensor]
    final: Tensor
    lengths: Tensor | None


def group(run: StepContext, number: int, begun: int, steps: Sequence[int]) -> Group:
    """The group of prompt ``number``."""
    slots = [Slot(0, number, 0, run.prompts[number])] * begun
    ids = [SampleId(0, number, 0, k) for k in range(begun)]
    run.pipeline.encode(slots[:1])
    actions = recorded_steps(run.pipeline, 0) if "log_probs" in run.objective.needs else []
    labels = run.recipe.midway.rewards if run.recipe.midway is not None else ()
    partial = {at: scored(run, run.pipeline.begin(slots, ids, actions, run.recipe.seed, at), labels) for at in steps}
    whole = run.pipeline.sample(slots, ids, actions, run.recipe.seed)
    lengths = torch.tensor(whole.responses) if run.pipeline.makes == "text" else None
    return Group(partial, scored(run, whole), lengths)


def work(one: Group, kept: Sequence[int], at: int, total: int) -> tuple[float, float]:
    """Steps or tokens relative to no pruning, and the share of the tokens that is cut."""
    begun, keep = len(one.final), len(kept)
    if one.lengths is None:
        return (begun * (at + 1) + keep * (total - at - 1)) / (keep * total), 0.0
    early, late = one.lengths.clamp(max=at), (one.lengths - at).clamp(min=0)
    drawn = (early.sum() + late[list(kept)].sum()).item()
    return drawn / one.lengths[:keep].sum().item(), 1 - drawn / one.lengths.sum().item()


def line(at: int, groups: Sequence[Group], keep: int, total: int, rule: Rule) -> str:
    """The row of the table for pruning after ``at`` steps."""
    ranks, rows, flat = list[float](), list[list[float]](), 0
    for one in groups:
        final = one.final
        rank = rank_correlation(one.partial[at], final)
        ranks += [] if rank is None else [rank]
        kept = chosen(one.partial[at], keep, rule)
        flat += int(final[kept].max() == final[kept].min())
        spread = [final[kept], final[:keep], final[chosen(final, keep, rule)]]
        shift = (final[kept].mean() - final.mean()).item()
        rows.append([*(of.std(correction=0).item() for of in spread), shift, *work(one, kept, at, total)])
    *spread, shift, steps, cut = (statistics.mean(column) for column in zip(*rows, strict=True))
    shown = f"{statistics.mean(ranks):6.2f}" if ranks else "     -"
    means = "  ".join(f"{value:6.3f}" for value in (*spread, shift))
    return f"{at:4d}  {shown}  {means}  {flat / len(groups):5.2f}  {steps:5.2f}  {cut:5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="shapes-lora")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--begun", type=int, default=24)
    parser.add_argument("--keep", type=int, default=12)
    parser.add_argument("--rule", choices=get_args(Rule), default="spread")
    parser.add_argument("--every", type=int, help="steps, or tokens, between two rows")
    given, changes = parser.parse_known_args()
    loaded = load_recipe([given.recipe], changes)
    run = build(loaded.recipe, loaded.root)
    total, text = forwards_of_a_sample(loaded.recipe), loaded.recipe.makes == "text"
    every = given.every or (4 if text else 1)
    steps = range(every, total, every)
    groups = [group(run, n, given.begun, steps) for n in range(given.prompts)]
    plain = sum(int(one.final[: given.keep].max() == one.final[: given.keep].min()) for one in groups)
    what = f"up to {total} tokens" if text else f"{total} denoising steps"
    print(f"{given.recipe}: {given.prompts} groups of {given.begun}, {given.keep} kept ({given.rule}), {what}")
    print(f"without pruning {plain / len(groups):.2f} of the groups are flat")
    print("step    rank    kept   first    best   shift   flat  steps    cut")
    for at in steps:
        print(line(at, groups, given.keep, total, given.rule))


if __name__ == "__main__":
    main()
