"""Dynamic sampling (DAPO, arXiv 2503.14476, sec. 3.2): replace groups whose rewards are all equal.

A group is *valid* if its rewards differ, and *flat* if they are all equal. The attempts of a slot have a fixed order:
its prompt of the epoch, then the replacement prompts 1, 2 and so on. A slot trains on its first valid attempt, or on
the last of ``max_attempts``. The number of attempts per round changes how many samples are wasted, but not which group
a slot trains on. The result therefore depends neither on the number of controllers nor on earlier steps. Controllers do
not communicate here, so that asynchronous rollout (``mmrl.rollout.async_rollout``) can run this in a thread.

The first round samples one attempt per slot. A slot that is still flat after ``n`` rounds gets ``2 ** (n - 1) / valid``
more, where ``valid`` is the moving average of the fraction of valid groups: enough to make one valid group likely, and
then twice as many each time, since few slots are left and every round has a fixed cost
(``benchmarks/dynamic_sampling.py`` measures both).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mmrl.algorithms.advantages import flat_groups
from mmrl.core.checkpoint_reader import PartState, Saved
from mmrl.core.clock import Clock
from mmrl.core.json_types import JsonObject, as_number
from mmrl.core.trajectory import Slot
from mmrl.rollout.rounds import sample_and_score
from mmrl.step.batch import Groups, Round
from mmrl.step.step_context import FinishedStep, RolloutStrategy, StepContext, StepPart
from mmrl.step.step_metrics import StepMetrics

DECAY = 0.9
"""Decay per step of the moving average of the fraction of valid groups."""


class DynamicSampling(StepPart, RolloutStrategy):
    """Final class. ``most``: largest number of attempts per slot. ``valid``: moving average of
    the fraction of valid groups over all controllers; 1 at the start.
    """

    replaces_groups = True

    def __init__(self, most: int, valid: float = 1.0) -> None:
        self.most, self.valid = most, valid

    def groups(self, context: StepContext, slots: list[Slot], step: int, clock: Clock, metrics: StepMetrics) -> Groups:
        rounds = [sample_and_score(context, slots, step, clock)]

        def again(slots: list[Slot]) -> Round:
            return sample_and_score(context, slots, step, clock, number=len(rounds))

        return resample(context, self, rounds, again, metrics)

    def ahead(self, rounds: int, tried: int) -> int:
        """The number of attempts in the next round for a slot that is flat after ``rounds`` rounds and ``tried``
        attempts."""
        wanted = 2 ** (rounds - 1) / max(self.valid, 1 / self.most)
        return min(self.most - tried, round(wanted))

    def end_step(self, context: StepContext, done: FinishedStep) -> dict[str, float]:
        """Update the average with the step's ``sampling/valid`` of all controllers; returns it as a metric."""
        self.valid = DECAY * self.valid + (1 - DECAY) * done.metrics["sampling/valid"]
        return {"sampling/valid_ema": self.valid}

    def state_dict(self) -> PartState:
        return PartState({"valid": self.valid})

    def load_state_dict(self, numbers: JsonObject, saved: Saved, context: StepContext) -> None:
        self.valid = as_number(numbers["valid"])


@dataclass(frozen=True)
class _Group:
    """An attempt of a slot: group ``place`` of round ``round``; ``flat``: its rewards are all equal."""

    attempt: int
    round: int
    place: int
    flat: bool


def resample(
    context: StepContext,
    attempts: DynamicSampling,
    rounds: list[Round],
    sample: Callable[[list[Slot]], Round],
    metrics: StepMetrics,
) -> Groups:
    """Sample more attempts (``sample``) for the flat slots of ``rounds[0]``, until every slot is valid or has no
    attempts left.

    Appends to ``rounds``.
    """
    tried = [[group] for group in _groups(context, rounds[0], 0)]
    while True:
        again: list[tuple[int, Slot]] = []
        for i, groups in enumerate(tried):
            if all(group.flat for group in groups):
                first = groups[-1].attempt + 1
                more = range(first, first + attempts.ahead(len(rounds), len(groups)))
                again += [(i, context.controller.replacement(rounds[0].slots[i], n, context.prompts)) for n in more]
        if not again:
            break
        rounds.append(sample([slot for _, slot in again]))
        for (i, _), group in zip(again, _groups(context, rounds[-1], len(rounds) - 1), strict=True):
            tried[i].append(group)
        for groups in tried:
            groups.sort(key=lambda group: group.attempt)  # the replacement of an unusable prompt has a later number
    chosen = [next((group for group in groups if not group.flat), groups[-1]) for groups in tried]
    everything = [group for groups in tried for group in groups]
    valid = torch.tensor(float(sum(not group.flat for group in everything)))
    metrics.gather({"sampling/valid": valid}, {"sampling/rounds": torch.tensor(float(len(rounds)))}, len(everything))
    unused = sum(g.attempt > one.attempt for one, groups in zip(chosen, tried, strict=True) for g in groups)
    metrics.count({"sampling/groups": len(everything), "sampling/ahead_unused": unused})
    return Groups(rounds, [(group.round, group.place) for group in chosen], context.recipe.train.group_size)


def _groups(context: StepContext, of: Round, number: int) -> list[_Group]:
    """The groups of round ``number``, and whether their rewards are all equal.

    A reward with ``normalize: batch`` is also compared by itself: its scale is not known before the batch is complete,
    and in an unscaled sum it could cancel other rewards.
    """
    rows = torch.arange(len(of.slots)).repeat_interleave(context.recipe.train.group_size)
    total = of.scores.total
    flat = flat_groups(total, rows)
    for label in context.rewards.by_batch:
        flat &= flat_groups(torch.where(total.isnan(), torch.nan, of.scores.parts[label]), rows)
    return [_Group(slot.attempt, number, n, bool(flat[n])) for n, slot in enumerate(of.slots)]
