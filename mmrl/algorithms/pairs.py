"""What the offline objectives share: a loss per pair of a better and a worse response, averaged over pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor

from mmrl.algorithms.advantages import Advantages
from mmrl.algorithms.objective import Kind, Loss, Scored, current


class PairObjective(ABC):
    """Abstract; see ``mmrl.algorithms.objective.Objective``. ``B`` is a number of pairs."""

    kind: Kind = "offline"
    needs: frozenset[str]
    prepares: frozenset[str] = frozenset()
    samples_with = staticmethod(current)
    copies: ClassVar[dict[str, Callable[[int], float]]] = {}
    entries = None

    @abstractmethod
    def pair_loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss ``[B]`` with its graph, and what the log says of each pair, ``[B]``."""

    def advantages(self, scored: Scored) -> Advantages:
        """Raises ``TypeError``: pairs are given, and nothing is sampled that could have an advantage."""
        raise TypeError(f"{type(self).__module__} is offline: it has pairs and no rewards")

    def amount(self, weights: Tensor, lengths: Tensor) -> float:
        """The number of pairs that count."""
        return float(weights.double().sum())

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """``old``: weights ``[B]`` (0 leaves a pair out), and what ``pair_loss`` reads of the data."""
        weights = old["weights"]
        value, logged = self.pair_loss(new, old)
        return Loss(
            value=(value * weights).sum() / total,
            sums={name: (v.detach() * weights).sum() for name, v in {"policy/loss": value, **logged}.items()},
            maxima={},
        )
