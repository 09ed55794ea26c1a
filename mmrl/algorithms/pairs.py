"""Shared code of the offline objectives: a loss per pair of a better and a worse response, averaged over pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from mmrl.algorithms.objective import Loss, OfflineObjective


class PairObjective(OfflineObjective, ABC):
    """Abstract; see ``mmrl.algorithms.objective.Offline``. ``B`` is a number of pairs."""

    needs: frozenset[str]

    @abstractmethod
    def pair_loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss ``[B]`` with its graph, and for the log each metric's values ``[B]``."""

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """``old``: weights ``[B]`` (0 leaves a pair out), and the tensors that ``pair_loss`` reads."""
        weights = old["weights"]
        value, logged = self.pair_loss(new, old)
        return Loss(
            value=(value * weights).sum() / total,
            sums={name: (v.detach() * weights).sum() for name, v in {"policy/loss": value, **logged}.items()},
            maxima={},
        )
