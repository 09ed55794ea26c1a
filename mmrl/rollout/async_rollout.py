"""Asynchronous sampling: samples for step ``n`` are drawn while earlier steps train (``placement: disaggregated``).

The groups of step ``n`` are always sampled with the weights after step ``n - staleness`` (the first steps with the
initial weights), never with newer ones that happen to be ready. The samples therefore do not depend on the speed of the
devices, on the number of controllers, or on where a run was stopped. Sampling begins as soon as those weights exist.

The policy has changed since then. Truncated importance weights correct this in the same way as the mismatch of an
engine: the old policy's probability over that of the policy that sampled (``mmrl.algorithms.mismatch``; the decoupled
objective of AReaL, arXiv 2505.24298, eq. 5). Of pictures the weights use mean log-probs, as Flow-GRPO's ratios do.

With dynamic sampling, the replacements of a step (``mmrl.rollout.dynamic_sampling``) are also sampled while earlier
steps train, with the same weights as its first groups. The number of replacements per round follows the fraction of
valid groups at the time of those weights.

With partial rollout (``mmrl.rollout.partial_rollout``), sampling for step ``n`` begins when that for step ``n - 1`` has
ended, and continues its unfinished responses with the weights for step ``n``. Such a response has tokens of several
versions of the policy, each with the log-prob of the version that sampled it.

A checkpoint keeps the weights of the last ``staleness`` versions, their fractions of valid groups, and the unfinished
responses after the last finished step. Other samples are not kept: a resumed run samples them again, and they are
equal.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch

from mmrl.algorithms.objective import sampler
from mmrl.core.checkpoint_reader import PartState, Saved
from mmrl.core.clock import Clock
from mmrl.core.daemon import in_daemon
from mmrl.core.json_types import JsonObject, as_integer, as_number, as_object
from mmrl.core.trajectory import Slot
from mmrl.models.policy import Version
from mmrl.rollout.dynamic_sampling import DynamicSampling, resample
from mmrl.rollout.partial_rollout import PartialRollout, PartialRound
from mmrl.rollout.rounds import Sampling, sample_and_score
from mmrl.step.batch import Groups, Round
from mmrl.step.step_context import RolloutStrategy, StepContext, StepPart
from mmrl.step.step_metrics import StepMetrics, Sums

_FILE = "ahead"
"""The name of its file in a checkpoint."""
Replaced = tuple[Groups, Sums]
"""The groups of dynamic sampling, and what they add to the metrics."""


@dataclass(frozen=True)
class Begun:
    """A step that is being sampled. ``first``: its first round. ``drawn`` is done when that round is sampled, ``ended``
    when all rounds of dynamic sampling are. With partial rollout ``first`` is None and ``drawn`` has the result."""

    first: Sampling | None
    drawn: Future[PartialRound | None]
    ended: Future[Replaced | None]


class AsyncRollout(StepPart, RolloutStrategy):
    """Final class: what this controller samples for this step and the next ones, and the
    versions of the weights for it.

    Threads of each step submit samples to the rewards as they arrive, and replace groups; the steps take turns.
    """

    def __init__(
        self, staleness: int, partial: PartialRollout | None = None, dynamic: DynamicSampling | None = None
    ) -> None:
        self.staleness, self.partial, self.dynamic = staleness, partial, dynamic
        self.replaces_groups = dynamic is not None
        self._versions: dict[int, Version] = {}
        self._valid: dict[int, float] = {}
        """``DynamicSampling.valid`` at the time of each version."""
        self._begun: dict[int, Begun] = {}

    def groups(self, context: StepContext, slots: list[Slot], step: int, clock: Clock, metrics: StepMetrics) -> Groups:
        """Begin the steps that the present weights sample for, and wait for the samples of ``step``.

        Raises ``UserError``.
        """
        self._versions[step] = context.compute.devices.version(context, sampler(context.objective, step))
        self._valid[step] = 1.0 if self.dynamic is None else self.dynamic.valid
        last = min(step + self.staleness, context.recipe.train.steps - 1)
        for n in range(step, last + 1):
            if n not in self._begun:
                self._begun[n] = self._begin(context, n, clock)
        self._versions = {n: version for n, version in self._versions.items() if n + self.staleness > step}
        self._valid = {n: self._valid[n] for n in self._versions}
        begun = self._begun.pop(step)
        with context.compute.devices.lending(context, step):
            return self._finished(context, begun, step, clock, metrics)

    def _finished(self, context: StepContext, begun: Begun, step: int, clock: Clock, metrics: StepMetrics) -> Groups:
        """Wait for the samples of ``step`` and their rewards."""
        size = context.recipe.train.group_size
        with clock("sample"):
            sampled = begun.drawn.result()
        if self.partial is not None and sampled is not None:
            return Groups.of_round(self.partial.collect(context, sampled, step, clock, metrics), size)
        assert begun.first is not None
        metrics.gather({}, {"sampling/stale_steps": torch.tensor(float(step - self._of(step)))}, 1)
        if self.dynamic is None:
            return Groups.of_round(begun.first.finish(clock), size)
        with clock("reward"):  # replacements wait for the rewards of the first round
            replaced = begun.ended.result()
        assert replaced is not None
        groups, counted = replaced
        metrics.merge([counted])
        return groups

    def state_dict(self) -> PartState:
        """The weights of every version, as ``step.name``, with its number of updates and its fraction of valid
        groups."""
        tensors = {f"{n}.{name}": t for n, version in self._versions.items() for name, t in version.tensors.items()}
        known = {str(n): {"updates": v.updates, "valid": self._valid[n]} for n, v in self._versions.items()}
        return PartState(known, {_FILE: tensors})

    def load_state_dict(self, numbers: JsonObject, saved: Saved, context: StepContext) -> None:
        """Restore ``state_dict``; the next call of ``groups`` samples again what was unfinished."""
        tensors = saved.parts(_FILE).get(_FILE, {})
        self._begun.clear()
        versions = {int(n): as_object(of) for n, of in numbers.items()}
        self._valid = {n: as_number(of["valid"]) for n, of in versions.items()}
        self._versions = {
            n: Version(
                as_integer(of["updates"]),
                sampler(context.objective, n),
                {name: tensors[f"{n}.{name}"] for name in context.policy.trainable},
            )
            for n, of in versions.items()
        }

    def _of(self, step: int) -> int:
        """The version of the weights that samples for ``step``."""
        return max(0, step - self.staleness)

    def _begin(self, context: StepContext, step: int, clock: Clock) -> Begun:
        version, inside = self._versions[self._of(step)], Clock(torch.device("cpu"))
        if self.partial is not None:
            sample, first = partial(self.partial.draw, context, step, self._of(step), inside, version), None
        else:
            slots = context.controller.slots(step, context.prompts, context.recipe.train.prompts_per_step)
            first = Sampling(context, slots, step, clock, inside, version)
            sample = first.collect
        before = [*self._begun.values()]
        attempts = None if self.dynamic is None else type(self.dynamic)(self.dynamic.most, self._valid[self._of(step)])

        def draw() -> PartialRound | None:
            for earlier in before:
                earlier.ended.result()  # raises: the run ends, and unfinished responses are not known
            return sample()

        def end() -> Replaced | None:
            drawn.result()
            if first is None or attempts is None:  # ``groups`` finishes the round: it may need all controllers
                return None
            return _replaced(context, attempts, first, step, inside, version)

        drawn = in_daemon(draw, f"mmrl-ahead-{step}")
        return Begun(first, drawn, in_daemon(end, f"mmrl-replaced-{step}"))


def _replaced(
    context: StepContext, attempts: DynamicSampling, first: Sampling, step: int, inside: Clock, version: Version
) -> Replaced:
    rounds, metrics = [first.finish(inside)], StepMetrics()

    def again(slots: list[Slot]) -> Round:
        return sample_and_score(context, slots, step, inside, version, len(rounds))

    return resample(context, attempts, rounds, again, metrics), metrics.sums()
