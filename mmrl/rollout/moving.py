"""Prompts move from a slow controller to another (``train.balance: moving``).

Each controller begins its prompts a portion at a time, and encodes them only then. One that has no more begins those
that another has not begun (``mmrl.placement.portions``). Only counts travel: every controller knows how the step's
slots were divided, and reads the prompts that it takes itself. A sample depends on its slot and not on the controller,
so the groups stay the same; only sums over the prompts of a controller have another order.

A portion is as many slots as fill whole micro-batches, cut as without moving, so that every micro-batch has the same
samples. Replacements of dynamic sampling stay with the controller that has the slot's first group.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from mmrl.config.moving_checks import slots_at_once
from mmrl.config.schema import Recipe
from mmrl.core.clock import Clock
from mmrl.core.trajectory import Slot
from mmrl.placement.portions import Claims
from mmrl.rewards.scoring import Failure
from mmrl.rollout.encoding import MOST_REPLACED, encode
from mmrl.rollout.midway import chunked
from mmrl.step.batch import Groups, Round, samples_of
from mmrl.step.step_context import Chunk, ComingChunks, StepContext
from mmrl.step.step_metrics import StepMetrics, Sums


def prompts_move(context: StepContext, number: int = 0) -> bool:
    """Whether prompts of round ``number`` of a step may move to another controller: then a step's slots are not those
    that it was given."""
    return context.recipe.train.balance == "moving" and context.controller.size > 1 and number == 0


class Coming(ComingChunks):
    """Final class: the micro-batches of a round, in the order in which this controller begins them. The lists grow with
    every portion.

    ``slots``, ``keys``, ``bad``: of the prompts begun so far, as ``encode`` returned them; ``rows``: for each
    micro-batch the places of its samples among all samples of the round.
    """

    def __init__(self, context: StepContext, slots: Sequence[Slot], step: int, clock: Clock) -> None:
        self.slots: list[Slot] = []
        self.keys: list[str] = []
        self.bad: list[Failure] = []
        self.rows: list[list[int]] = []
        self._context, self._step, self._clock = context, step, clock
        self._own = {slot.index: slot for slot in slots}
        self._taken = 0
        controller, size = context.controller, slots_at_once(context.recipe)
        division = controller.division(step)
        self._lists = [portions(share, size, division.costs) for share in division.shares]
        self._batches = size * context.recipe.train.group_size // context.recipe.sampled_at_once
        counters = controller.peers.counters(str(step))
        devices = context.recipe.devices_per_controller
        self._claims = Claims(controller.rank, [*map(len, self._lists)], counters, devices)
        self._began, self._handed = time.perf_counter(), 0
        self._chunks: deque[Chunk] = deque()

    @property
    def left(self) -> int:
        """About how many micro-batches of this controller's own prompts are still to come."""
        return len(self._chunks) + self._claims.left * self._batches

    @property
    def over(self) -> bool:
        return self._claims.over and not self._chunks

    def tell(self, open: float, each: float) -> None:
        self._claims.tell(open + each * len(self._chunks), each * self._batches)

    def __next__(self) -> Chunk:
        if not self._chunks:
            if self._handed and self._context.recipe.devices_per_controller == 1:  # all that was handed out is sampled
                self.tell(0.0, (time.perf_counter() - self._began) / self._handed)
            number = self._claims.own()
            found = self._claims.other() if number is None else (self._context.controller.rank, number)
            if found is None:
                raise StopIteration
            self._begin(*found)
        self._handed += 1
        return self._chunks.popleft()

    def _begin(self, rank: int, number: int) -> None:
        """Have the features of a portion, the ``number``-th in the list of the controller ``rank``, and make its
        micro-batches."""
        context, size, indices = self._context, self._context.recipe.train.group_size, self._lists[rank][number]
        with self._clock("encode"):
            if rank != context.controller.rank:
                self._taken += len(indices)
                found = context.controller.slots_at(
                    indices, self._step, context.prompts, context.recipe.train.prompts_per_step
                )
            else:
                found = [self._own[index] for index in indices]
            allowed = MOST_REPLACED * len(self._own) - len(self.bad)
            slots, keys, bad = encode(context, found, most=allowed)
        first = len(self.slots) * size
        chunks, rows = chunked(context, samples_of(slots, size))
        self.slots += slots
        self.keys += keys
        self.bad += bad
        self.rows += [[first + n for n in of] for of in rows]
        self._chunks += chunks

    def measured(self) -> Sums:
        """The metrics of what moved."""
        metrics = StepMetrics()
        metrics.count({"balance/moved": self._taken})
        return metrics.sums()


def portions(share: Sequence[int], size: int, costs: Sequence[float] | None) -> list[list[int]]:
    """The slots of a controller in portions of ``size``, in the order in which it begins them.

    The one with fewer slots, if there is one, is the first, which does not move. The others begin with the most
    expensive: then what is begun last, or moves, is short.
    """
    found = [list(share[n : n + size]) for n in range(0, len(share), size)]
    short = [found.pop()] if len(found[-1]) < size else []
    if costs is not None:
        found.sort(key=lambda slots: -sum(costs[index] for index in slots))
    return [*short, *found]


def whole_first(recipe: Recipe, whole: Round) -> Groups:
    """The groups of a round, last those whose micro-batch has fewer rows than others: an update then has the
    micro-batches of sampling."""
    most, size = recipe.sampled_at_once, [len(whole.micro_batches[m]) for m, _ in whole.places(0)]
    rows = len(size) // len(whole.slots)
    groups = [(min(size[n * rows : (n + 1) * rows]) < most, n) for n in range(len(whole.slots))]
    return Groups([whole], [(0, n) for _, n in sorted(groups)], recipe.train.group_size)
