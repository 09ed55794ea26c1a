"""What an objective is to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Kind = Literal["policy_gradient", "forward_process", "pathwise"]
"""What an update is made of (DESIGN 2): recorded actions, clean results noised afresh, or a differentiable reward."""


@dataclass(frozen=True)
class Loss:
    """``value``: a scalar with a graph, already divided by the update's global denominator.

    ``sums``: detached sums over this slice's entries, each divided by the same denominator when logged, and
    ``maxima``: detached maxima.
    """

    value: Tensor
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


class Objective(Protocol):
    """A pure function from recomputed tensors to a loss, with what the loop must know to feed it."""

    kind: Kind
    needs: frozenset[str]
    """Names of the tensors that recomputation must return."""
    advantage_std: Literal["group", "batch", "none"]
    """What group advantages are divided by."""
    samples_with: str
    """The copy of the weights that samples: ``"current"``, or one of ``copies``."""
    copies: Mapping[str, Callable[[int], float]]
    """Copies of the weights to keep, and the decay each is moved with after step ``n``."""
    entries: int | None
    """Entries of a sample (noise levels, actions) that an update uses; None takes all the pipeline has."""
    last_steps: int
    """Sampling steps that carry a graph (pathwise objectives)."""

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """``new``: recomputed under the current weights; ``old``: what sampling recorded; ``total``: the number of
        entries of the whole optimizer step over all controllers."""
        ...
