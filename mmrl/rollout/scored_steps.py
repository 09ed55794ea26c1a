"""Rewards of the results that are predicted before each recorded denoising step (``scores_steps`` of an algorithm)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from mmrl.core.trajectory import Sample
from mmrl.rewards.scoring import RewardError, Scores
from mmrl.step.step_context import SamplingSpec, StepContext


class Steps:
    """Final class: the predicted results of a round, scored while others are drawn. A reward per group compares those
    of one step. Rewards of weight 0 are not asked."""

    def __init__(self, context: StepContext, how: SamplingSpec) -> None:
        labels = [label for label, weight in context.rewards.weights.items() if weight]
        self._count, self._rows = len(how.actions), 0
        self._scoring = context.rewards.start(how.step, scale=False, round=how.round, patient=False, labels=labels)

    def add(self, samples: Sequence[Sample], rows: Sequence[int]) -> None:
        """``samples`` of the rows of a micro-batch before their first recorded step, then before the second, ...;
        ``rows``: the places of its rows in the round. Raises ``RewardError``."""
        places = [row * self._count + k for k in range(self._count) for row in rows]
        self._rows += len(rows)
        with _of_steps():
            self._scoring.add(samples, places)

    def beside(self, scores: Scores, size: int) -> Scores:
        """``scores`` with those of the steps; ``size``: samples of a group. Raises ``RewardError``."""
        groups = [
            [row * self._count + k for row in range(first, first + size)]
            for first in range(0, self._rows, size)
            for k in range(self._count)
        ]
        with _of_steps():
            found = self._scoring.finish(groups)
        return replace(scores, failures=[*scores.failures, *found.failures], steps=found.total.view(-1, self._count))


@contextmanager
def _of_steps() -> Generator[None]:
    try:
        yield
    except RewardError as error:
        raise RewardError(f"of results predicted before a denoising step: {error}") from error
