"""The step part of ``data.sampler``: the sampler learns from the groups of all controllers, and its state is saved."""

from __future__ import annotations

from typing import Any

from mmrl.core.checkpoint_reader import PartState, Saved
from mmrl.core.errors import UserError
from mmrl.data.sampler import Chosen, GroupResult, score_of
from mmrl.step.step_context import FinishedStep, StepContext, StepPart

_Group = tuple[int, int, dict[str, list[float]]]
"""Slot, attempt, and the rewards by label."""


class Curriculum(StepPart):
    """Final class. The choice of ``prompts`` depends on earlier steps."""

    def __init__(self, prompts: Chosen) -> None:
        self.prompts = prompts

    def end_step(self, context: StepContext, done: FinishedStep) -> dict[str, float]:
        """Give the sampler the rewards of all controllers' groups, by slot; returns its metrics.

        Raises ``UserError`` if controllers did not choose the same prompts.
        """
        controller, prompts = context.controller, self.prompts
        everyone = controller.gather((prompts.digest, _groups(done)))
        if len({digest for digest, _ in everyone}) > 1:
            raise UserError(
                f"data.sampler: controllers chose different prompts for step {done.step + 1}; a choice may only depend "
                "on the prompts, the seed, the step and the arguments of learn"
            )
        results = []
        for slot, attempt, rewards in sorted((g for _, groups in everyone for g in groups), key=lambda g: (g[0], g[1])):
            if attempt:
                index = controller.other_index(done.step, slot, attempt, prompts)
            else:
                index = prompts.place(controller.seed, done.step * prompts.per_step + slot)
            results.append(GroupResult(index, rewards, score_of(rewards, context.rewards.weights)))
        found = prompts.asked(lambda: prompts.sampler.learn(done.step, results))
        return {f"sampler/{name}": float(value) for name, value in (found or {}).items()}

    def state_dict(self) -> PartState:
        return PartState(self.prompts.state())

    def load_state_dict(self, numbers: Any, saved: Saved, context: StepContext) -> None:
        self.prompts.asked(lambda: self.prompts.sampler.load_state_dict(numbers))


def _groups(done: FinishedStep) -> list[_Group]:
    """This controller's groups; empty if the algorithm does not sample."""
    found: dict[tuple[int, int], dict[str, list[float]]] = {}
    for label, values in done.batch.rewards.items():
        for sample, value in zip(done.batch.ids, values.tolist(), strict=True):
            found.setdefault((sample.slot, sample.attempt), {}).setdefault(label, []).append(value)
    return [(slot, attempt, rewards) for (slot, attempt), rewards in found.items()]
