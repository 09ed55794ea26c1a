"""A controller: its rank, its share of the slots, and the few numbers that it exchanges with the others.

Every controller runs the same program on its own slots, and communicates through ``peers``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from mmrl.controller.peers import Alone, Peers
from mmrl.controller.workload_balance import divide
from mmrl.core.randomness import permutation, seed_of
from mmrl.core.trajectory import Prompt, Slot

T = TypeVar("T")


@runtime_checkable
class Ordered(Protocol):
    """Prompts that set their order in training, in place of a random permutation per epoch. Both methods return the
    same on every controller."""

    def place(self, seed: int, number: int) -> int:
        """The index of the prompt at position ``number``, counted from the first step."""
        ...

    def draw(self, number: int) -> int:
        """The index of a prompt by a random ``number``, which replaces an unusable one."""
        ...


@dataclass(frozen=True)
class Division:
    """The slots of each controller in a step, by index. ``costs``: the predicted work of each slot, if it was
    predicted."""

    shares: list[list[int]]
    costs: list[float] | None = None


@dataclass(frozen=True)
class Controller:
    """Controller ``rank`` of ``size``; it communicates with the others through ``peers``."""

    seed: int
    rank: int = 0
    size: int = 1
    peers: Peers = field(default_factory=Alone, compare=False)
    _reading: Lock = field(default_factory=Lock, compare=False, repr=False)
    _divisions: dict[int, Division] = field(default_factory=dict, compare=False, repr=False)

    @property
    def leads(self) -> bool:
        """Whether this controller writes metrics, checkpoints and the report for all."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """The sum of a small tensor over all controllers."""
        return self.peers.sum(values.clone(), "statistics")

    def count(self, value: float) -> float:
        """The sum of a number over all controllers."""
        return sum(self.gather(value))

    def gather(self, values: T) -> list[T]:
        """The values of all controllers, in the order of their ranks (all-gather)."""
        return self.peers.gather(values)

    def gradients(self, values: Tensor) -> Tensor:
        """Sum gradients ``[n]`` over all controllers, in place (all-reduce)."""
        return self.peers.sum(values, "gradients")

    def share(self, n: int) -> range:
        """This controller's contiguous part of ``range(n)``; rank 0 has the first."""
        return range(self.rank * n // self.size, (self.rank + 1) * n // self.size)

    def slots(
        self, step: int, prompts: Sequence[Prompt], per_step: int, cost: Callable[[Prompt], float] | None = None
    ) -> list[Slot]:
        """This controller's share of the ``per_step`` slots of ``step``, by index.

        Slot ``i`` has position ``step * per_step + i`` in an endless sequence of epochs, each a permutation of
        ``prompts``, or in the order of the prompts (``Ordered``). Its samples do not depend on the controller that runs
        it. This controller gets every ``size``-th slot; with ``cost``, which predicts the work of a prompt, as many
        slots, chosen so that all controllers have equal work. Then each controller reads every ``size``-th prompt and
        those of its slots, and controllers exchange only numbers.
        """
        own = range(self.rank, per_step, self.size)
        found = dict(zip(own, self.slots_at(own, step, prompts, per_step), strict=True))
        if cost is None or self.size == 1:
            self._keep(step, Division([list(range(rank, per_step, self.size)) for rank in range(self.size)]))
            return list(found.values())
        everyone = self.gather([cost(s.prompt) for s in found.values()])
        costs = [everyone[index % self.size][index // self.size] for index in range(per_step)]
        shares = divide(costs, self.size)
        self._keep(step, Division(shares, costs))
        given = shares[self.rank]
        others = [index for index in given if index not in found]
        found |= dict(zip(others, self.slots_at(others, step, prompts, per_step), strict=True))
        return [found[index] for index in given]

    def division(self, step: int) -> Division:
        """How ``slots`` has divided ``step``, the last one that it has divided: the same on every controller."""
        return self._divisions[step]

    def _keep(self, step: int, division: Division) -> None:
        self._divisions.clear()
        self._divisions[step] = division

    def slots_at(self, indices: Iterable[int], step: int, prompts: Sequence[Prompt], per_step: int) -> list[Slot]:
        """The slots ``indices`` of the ``per_step`` slots of ``step``, of any controller."""
        orders: dict[int, list[int]] = {}
        found = []
        for index in indices:
            if isinstance(prompts, Ordered):
                n = prompts.place(self.seed, step * per_step + index)
                found.append(Slot(step, index, 0, self._read(prompts, n)))
                continue
            epoch, place = divmod(step * per_step + index, len(prompts))
            order = orders.get(epoch) or orders.setdefault(epoch, permutation(self.seed, epoch, len(prompts)))
            found.append(Slot(step, index, 0, self._read(prompts, order[place])))
        return found

    def replacement(self, slot: Slot, attempt: int, prompts: Sequence[Prompt]) -> Slot:
        """``slot`` with its ``attempt``-th replacement prompt, which is the same on every controller."""
        n = self.other_index(slot.step, slot.index, attempt, prompts)
        return Slot(slot.step, slot.index, attempt, self._read(prompts, n))

    def other_index(self, step: int, index: int, attempt: int, prompts: Sequence[Prompt]) -> int:
        """The index of the prompt of ``replacement``."""
        drawn = seed_of(self.seed, step, index, attempt, "replacement")
        return prompts.draw(drawn) if isinstance(prompts, Ordered) else drawn % len(prompts)

    def _read(self, prompts: Sequence[Prompt], n: int) -> Prompt:
        with self._reading:  # asynchronous rollout reads replacements in a thread, and data sets are lazy
            return prompts[n]
