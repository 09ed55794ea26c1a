"""How well rewards in the middle of sampling rank the final ones, and what pruning by them gives, for each step.

    python benchmarks/midway.py [RECIPE] [--prompts 32] [--begun 24] [--keep 12] [--rule spread]
        [--branches 1] [key=value ...]

Samples groups of ``--begun`` with the model as it is, without training. For every denoising step (of text: for every
fourth token, or ``--every``) it scores the predicted results or the partial responses, and the finished ones. Prints:

- rank: Spearman's correlation of these rewards and the final ones in a group, mean over the groups where both differ;
- kept: standard deviation (mean over groups) of the final rewards of the ``--keep`` samples that ``midway`` would keep;
- first: the same of the first ``--keep`` samples (no pruning); best: of those it would keep if it knew the final ones;
- inner: with ``--branches`` the standard deviation of the final rewards of the branches of one beginning;
- shift: mean final reward of the kept samples minus that of all whole ones, mean over groups;
- flat: share of groups whose kept samples all have the same final reward;
- steps: denoising steps, or tokens, of single samples for a prompt, relative to no pruning;
- cut: of the tokens that all begun responses have at the end, the share that pruning does not draw (text).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.trajectory import Rows, SampleId, Slot
from mmrl.models.protocol import recorded_steps
from mmrl.planner.counts import forwards_of_a_sample
from mmrl.rollout.branches import branch_ids, known_std
from mmrl.rollout.midway import chosen, rank_correlation
from mmrl.step.step_context import StepContext

Rule = Literal["spread", "extremes", "best"]


def scored(run: StepContext, trajectory: Rows, labels: Sequence[str] = ()) -> Tensor:
    """The total reward of each sample, ``[B]``; ``labels``: the sum of these rewards."""
    samples = run.pipeline.samples(trajectory, run.rewards.inputs)
    found = run.rewards.score(samples, [range(len(samples))])
    return torch.stack([found.parts[label] for label in labels]).sum(0) if labels else found.total


@dataclass(frozen=True)
class Group:
    """One group. ``partial``: the rewards in the middle, after each number of steps, ``[begun]``. ``final``: those of
    whole samples, ``[begun]``, or ``[keep]`` if that is more; of text ``lengths`` are theirs in tokens. ``branched``:
    the final rewards ``[keep]`` of the branches, and their tokens beyond those steps."""

    partial: dict[int, Tensor]
    final: Tensor
    lengths: Tensor | None
    branched: dict[int, tuple[Tensor, int]]


@dataclass(frozen=True)
class How:
    """What is kept of a group, and how often each sample is continued."""

    begun: int
    keep: int
    rule: Rule
    branches: int

    def kept(self, rewards: Tensor) -> list[int]:
        return chosen(rewards, self.keep // self.branches, self.rule)


def group(run: StepContext, number: int, how: How, steps: Sequence[int]) -> Group:
    """The group of prompt ``number``."""
    size, seed = max(how.begun, how.keep), run.recipe.seed
    slots = [Slot(0, number, 0, run.prompts[number])] * size
    ids = [SampleId(0, number, 0, k) for k in range(size)]
    run.pipeline.encode(slots[:1])
    actions = recorded_steps(run.pipeline, 0) if "log_probs" in run.objective.needs else []
    labels = run.recipe.midway.rewards if run.recipe.midway is not None else ()
    partial, branched = dict[int, Tensor](), dict[int, tuple[Tensor, int]]()
    for at in steps:
        begun = run.pipeline.begin(slots[: how.begun], ids[: how.begun], actions, seed, at)
        partial[at] = scored(run, begun, labels)
        if how.branches > 1:
            rows = [k for k in how.kept(partial[at]) for _ in range(how.branches)]
            names = [branch_ids([ids[k]], n % how.branches, size)[0] for n, k in enumerate(rows)]
            done = run.pipeline.finish(replace(begun.rows(rows), ids=names), actions, seed, at)
            later = sum(max(0, n - at) for n in done.responses) if run.pipeline.makes == "text" else 0
            branched[at] = scored(run, done), later
    whole = run.pipeline.sample(slots, ids, actions, seed)
    lengths = torch.tensor(whole.responses) if run.pipeline.makes == "text" else None
    return Group(partial, scored(run, whole), lengths, branched)


def work(one: Group, how: How, at: int, total: int) -> tuple[float, float]:
    """Steps or tokens relative to no pruning, and the share of the tokens of all begun samples that is not drawn."""
    if one.lengths is None:
        return (how.begun * (at + 1) + how.keep * (total - at - 1)) / (how.keep * total), 0.0
    begun = one.lengths[: how.begun]
    kept = (begun - at).clamp(min=0)[how.kept(one.partial[at])]
    later = one.branched[at][1] if at in one.branched else kept.sum().item()
    drawn = begun.clamp(max=at).sum().item() + later
    cut = 1 - drawn / begun.sum().item() if how.branches == 1 else 0.0
    return drawn / one.lengths[: how.keep].sum().item(), cut


def line(at: int, groups: Sequence[Group], how: How, total: int) -> str:
    """The row of the table for pruning after ``at`` steps."""
    ranks, rows, flat = list[float](), list[list[float]](), 0
    for one in groups:
        final = one.final[: how.begun]
        rank = rank_correlation(one.partial[at], final)
        ranks += [] if rank is None else [rank]
        found = one.branched[at][0] if at in one.branched else final[how.kept(one.partial[at])]
        flat += int(found.max() == found.min())
        best = final[chosen(final, min(how.keep, how.begun), how.rule)]
        spread = [of.std(correction=0).item() for of in (found, one.final[: how.keep], best)]
        inner = known_std(found.view(-1, how.branches)).mean().item()
        rows.append([*spread, inner, (found.mean() - one.final.mean()).item(), *work(one, how, at, total)])
    *spread, inner, shift, steps, cut = (statistics.mean(column) for column in zip(*rows, strict=True))
    shown = f"{statistics.mean(ranks):6.2f}" if ranks else "     -"
    means = "  ".join(f"{value:6.3f}" for value in (*spread, inner, shift))
    return f"{at:4d}  {shown}  {means}  {flat / len(groups):5.2f}  {steps:5.2f}  {cut:5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="shapes-lora")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--begun", type=int, default=24)
    parser.add_argument("--keep", type=int, default=12)
    parser.add_argument("--rule", choices=get_args(Rule), default="spread")
    parser.add_argument("--every", type=int, help="steps, or tokens, between two rows")
    parser.add_argument("--branches", type=int, default=1, help="continuations of each of --keep / --branches samples")
    given, changes = parser.parse_known_args()
    loaded = load_recipe([given.recipe], changes)
    run = build(loaded.recipe)
    total, text = forwards_of_a_sample(loaded.recipe), loaded.recipe.makes == "text"
    every = given.every or (4 if text else 1)
    steps = range(every, total, every)
    how = How(given.begun, given.keep, given.rule, given.branches)
    groups = [group(run, n, how, steps) for n in range(given.prompts)]
    plain = sum(int(one.final[: given.keep].max() == one.final[: given.keep].min()) for one in groups)
    what = f"up to {total} tokens" if text else f"{total} denoising steps"
    branched = f", from {given.keep // given.branches} beginnings" if given.branches > 1 else ""
    print(
        f"{given.recipe}: {given.prompts} groups of {given.begun}, {given.keep} kept{branched} ({given.rule}), {what}"
    )
    print(f"without pruning {plain / len(groups):.2f} of the groups are flat")
    print("step    rank    kept   first    best   inner   shift   flat  steps    cut")
    for at in steps:
        print(line(at, groups, how, total))


if __name__ == "__main__":
    main()
