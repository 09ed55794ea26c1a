"""A round of a step: sample a group for every slot, and score the samples while others are drawn."""

from __future__ import annotations

from mmrl.algorithms.objective import sampler
from mmrl.core.clock import Clock
from mmrl.core.trajectory import Rows, Slot
from mmrl.models.policy import Version
from mmrl.models.protocol import recorded_steps
from mmrl.rollout.encoding import encode
from mmrl.rollout.midway import Beginning, Pruned, chunked, measures
from mmrl.rollout.moving import Coming, prompts_move
from mmrl.rollout.scored_steps import Steps
from mmrl.step.batch import Round, samples_of
from mmrl.step.step_context import SamplingSpec, StepContext


def sample_and_score(
    context: StepContext, slots: list[Slot], step: int, clock: Clock, version: Version | None = None, number: int = 0
) -> Round:
    """Sample a group for every slot, in micro-batches, and score it, as round ``number`` of the step."""
    sampling = Sampling(context, slots, step, clock, clock, version, number)
    sampling.collect()
    return sampling.finish(clock)


class Sampling:
    """Final class: a round in progress. The constructor submits it; ``collect`` may run in another thread.

    ``clock``: the caller's clock; ``inside``: that of the collecting thread. ``version``: see ``Devices.sample``.
    """

    def __init__(
        self,
        context: StepContext,
        slots: list[Slot],
        step: int,
        clock: Clock,
        inside: Clock,
        version: Version | None = None,
        number: int = 0,
    ) -> None:
        self._coming = Coming(context, slots, step, clock) if prompts_move(context, number) else None
        if self._coming is None:
            with clock("encode"):
                self._slots, self._keys, self._bad = encode(context, slots)
        else:  # encoded as they are begun
            self._slots, self._keys, self._bad = self._coming.slots, self._coming.keys, self._coming.bad
        self._size = context.recipe.train.group_size
        actions = recorded_steps(context.pipeline, step) if "log_probs" in context.objective.needs else []
        inputs = context.rewards.inputs
        weights = sampler(context.objective, step) if version is None else version.name
        how = SamplingSpec(actions, weights, context.recipe.seed, inputs, step=step, round=number)
        self._context, self._how, self._inside, self._version = context, how, inside, version
        self._beginning: Beginning | None = None
        self._pruned: Pruned | None = None
        self._scoring = context.rewards.start(
            step, self._size, scale=not context.rollout.strategy.replaces_groups, round=number
        )
        self._steps = Steps(context, how) if context.recipe.algorithm.scores_steps else None
        self._micro_batches: dict[int, Rows] = {}
        if self._coming is not None:
            self._rows = self._coming.rows
            self._drawn = context.compute.devices.sample(context, self._coming, how, inside, version)
        elif context.recipe.midway is None:
            asked, self._rows = chunked(context, samples_of(self._slots, self._size))
            self._drawn = context.compute.devices.sample(context, asked, how, inside, version)
        else:
            self._beginning = Beginning(context, self._slots, how, inside, version)

    def collect(self) -> None:
        """Submit each micro-batch to the rewards as soon as it is sampled. With ``midway`` first prune the groups."""
        if self._beginning is not None:
            self._pruned = self._beginning.prune()
            self._rows, asked = self._pruned.rows, self._pruned.chunks
            self._drawn = self._context.compute.devices.sample(
                self._context, asked, self._how, self._inside, self._version
            )
        for n, rows, samples in self._drawn:
            self._micro_batches[n] = rows
            self._scoring.add(samples[: len(rows)], self._rows[n])
            if self._steps is not None:
                self._steps.add(samples[len(rows) :], self._rows[n])

    def finish(self, clock: Clock) -> Round:
        """Wait for the rewards; returns the round. Raises ``RewardError``."""
        size, n = self._size, len(self._slots) * self._size
        with clock("reward"):
            scores = self._scoring.finish([list(range(first, first + size)) for first in range(0, n, size)])
            if self._steps is not None:
                scores = self._steps.beside(scores, size)
        scores.failures.extend(self._bad)
        micro_batches = [self._micro_batches[i] for i in sorted(self._micro_batches)]
        measured = None if self._coming is None else self._coming.measured()
        if self._pruned is not None:
            scores.failures.extend(self._pruned.failures)
            measured = measures(self._pruned, scores.total.view(-1, size), micro_batches)
        return Round(self._slots, self._keys, micro_batches, scores, [n for of in self._rows for n in of], measured)
