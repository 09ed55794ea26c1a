"""Asynchronous sampling: samples for step ``n`` are drawn while earlier steps train (``placement: disaggregated``).

The groups of step ``n`` are drawn with the weights as they were after step ``n - staleness`` (the first ones with
those that the run began with), always: not with whichever weights happen to be there. So who is faster, how many
controllers there are, and where a run was stopped change nothing in what is drawn. Sampling lags by exactly
``staleness`` steps, and begins as soon as those weights are there.

That the policy has moved since is corrected as the gap to an engine is: truncated importance weights, the policy before
the update over the policy that drew (``mmrl.algorithms.mismatch``; the decoupled objective of AReaL, arXiv 2505.24298,
eq. 5). Of pictures the weights are of mean log-probs, as Flow-GRPO's ratios are.

With dynamic sampling a step's replacements (``mmrl.rollout.dynamic_sampling``) are its samples like the first ones:
drawn with the same weights, while earlier steps train. How many are tried together follows the fraction of groups that
differed, as it was known when those weights were.

With partial rollout (``mmrl.rollout.partial_rollout``) the drawing of step ``n`` begins when that of step ``n - 1`` has
ended, and goes on with what that left in flight, under the weights of its own: a response of several drawings has
tokens of several versions, each with the log-prob it was drawn with.

A checkpoint keeps the weights of the last ``staleness`` versions, with that fraction, and what the last finished step
left in flight, no other samples: a resumed run draws again what was under way, which is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Thread

import torch

from mmrl.algorithms.objective import sampler
from mmrl.checkpoint.reader import PartState, Saved
from mmrl.engines.policy import Version
from mmrl.json_types import JsonObject, as_integer, as_number, as_object
from mmrl.report.clock import Clock
from mmrl.rollout.collect import Sampling, groups_of, sample_and_score
from mmrl.rollout.dynamic_sampling import DynamicSampling, resample
from mmrl.rollout.partial_rollout import PartialRollout, PartialRound
from mmrl.training.batch import Groups, Round
from mmrl.training.step_context import StepContext, StepPart
from mmrl.training.step_metrics import StepMetrics, Sums
from mmrl.trajectory import Slot

_FILE = "ahead"
"""The name of its file in a checkpoint."""
Replaced = tuple[list[Round], Groups, Sums]
"""The rounds of dynamic sampling, and what they add to the metrics."""


@dataclass(frozen=True)
class Begun:
    """A step whose ``first`` round is under way; ``drawn`` when its samples are, ``ended`` when no round is to come
    (None without dynamic sampling). With partial rollout there is no first round, and ``drawn`` has all of it."""

    first: Sampling | None = None
    drawn: Future[PartialRound | None] = field(default_factory=Future)
    ended: Future[Replaced | None] = field(default_factory=Future)


class AsyncRollout(StepPart):
    """Final class, a ``RolloutStrategy``: the rounds of this step and the next ones on this controller, and their
    versions.

    A thread of each step gives samples to the rewards as they come and has groups replaced, one step after the other.
    """

    def __init__(
        self, staleness: int, partial: PartialRollout | None = None, dynamic: DynamicSampling | None = None
    ) -> None:
        self.staleness, self.partial, self.dynamic = staleness, partial, dynamic
        self.replaces_groups = dynamic is not None
        self._versions: dict[int, Version] = {}
        self._valid: dict[int, float] = {}
        """``DynamicSampling.valid`` when each version was new."""
        self._begun: dict[int, Begun] = {}

    def groups(
        self, context: StepContext, slots: list[Slot], step: int, clock: Clock, metrics: StepMetrics
    ) -> tuple[list[Round], Groups]:
        """Begin what may be begun with the weights of now, and wait for ``step``: its rounds, and which groups stand.

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
        with clock("sample"):
            landed = begun.drawn.result()
        if self.partial is not None and landed is not None:
            whole = self.partial.collect(context, landed, step, clock, metrics)
            return [whole], groups_of(whole)
        assert begun.first is not None
        metrics.gather({}, {"sampling/stale_steps": torch.tensor(float(step - self._of(step)))}, 1)
        if self.dynamic is None:
            whole = begun.first.finish(clock)
            return [whole], groups_of(whole)
        with clock("reward"):  # replacements wait for what rewards say of the first
            replaced = begun.ended.result()
        assert replaced is not None
        rounds, groups, counted = replaced
        metrics.merge([counted])
        return rounds, groups

    def state_dict(self) -> PartState:
        """What a checkpoint keeps: the weights of every version as ``step.name``, and what else is known of each."""
        tensors = {f"{n}.{name}": t for n, version in self._versions.items() for name, t in version.tensors.items()}
        known = {str(n): {"updates": v.updates, "valid": self._valid[n]} for n, v in self._versions.items()}
        return PartState(known, {_FILE: tensors})

    def load_state_dict(self, numbers: JsonObject, saved: Saved, context: StepContext) -> None:
        """Restore ``state_dict``; the next ``groups`` draws again what was under way."""
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
        """The version that ``step`` is drawn with."""
        return max(0, step - self.staleness)

    def _begin(self, context: StepContext, step: int, clock: Clock) -> Begun:
        version, valid = self._versions[self._of(step)], self._valid[self._of(step)]
        inside = Clock(torch.device("cpu"))
        if self.partial is not None:
            return self._begin_flight(step, partial(self.partial.draw, context, step, self._of(step), inside, version))
        slots = context.controller.slots(step, context.prompts, context.recipe.train.prompts_per_step)
        first = Sampling(context, slots, step, clock, inside, version)
        begun = Begun(first)

        def replaced() -> Replaced | None:
            if self.dynamic is None:  # ``groups`` finishes the round: its statistics may be of all controllers
                return None
            rounds, metrics = [first.finish(inside)], StepMetrics()

            def again(slots: list[Slot]) -> Round:
                return sample_and_score(context, slots, step, inside, version, len(rounds))

            groups = resample(context, self.dynamic.at(valid), rounds, again, metrics)
            return rounds, groups, metrics.sums()

        before = [earlier.ended for earlier in self._begun.values()]
        Thread(target=_collect, args=(begun, before, replaced), name=f"mmrl-ahead-{step}", daemon=True).start()
        return begun

    def _begin_flight(self, step: int, draw: Callable[[], PartialRound]) -> Begun:
        begun, before = Begun(), [earlier.drawn for earlier in self._begun.values()]
        Thread(target=_fly, args=(begun, before, draw), name=f"mmrl-ahead-{step}", daemon=True).start()
        return begun


def _fly(begun: Begun, before: list[Future[PartialRound | None]], draw: Callable[[], PartialRound]) -> None:
    try:
        for earlier in before:
            earlier.result()  # what one that failed left in flight is not known
        begun.drawn.set_result(draw())
        begun.ended.set_result(None)
    except BaseException as error:
        _failed(begun, error)


def _collect(begun: Begun, before: list[Future[Replaced | None]], replaced: Callable[[], Replaced | None]) -> None:
    assert begun.first is not None
    for earlier in before:
        earlier.exception()
    try:
        begun.first.collect()
        begun.drawn.set_result(None)
        begun.ended.set_result(replaced())
    except BaseException as error:
        _failed(begun, error)


def _failed(begun: Begun, error: BaseException) -> None:
    for future in (begun.drawn, begun.ended):
        if not future.done():
            future.set_exception(error)
