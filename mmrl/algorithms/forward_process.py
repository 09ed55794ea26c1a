"""Shared code of the forward-process objectives: freshly noised clean samples, and the distance to the reference.

    L = mean over samples and noise levels of [ l(v) + kl_coef mean (v - v_ref)^2 ],   x_s = (1 - s) x0 + s eps

No SDE and no log-probs of steps: any solver may sample. The matching error of a prediction is ``mean (v - u)^2`` with
the target ``u = eps - x0``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from mmrl.algorithms.objective import EqualEntries, Loss
from mmrl.algorithms.sde import squared_distance


class ForwardObjective(EqualEntries, ABC):
    """Abstract; see ``mmrl.algorithms.objective.ForwardProcess``. A subclass defines ``losses``."""

    kind: Literal["forward_process"] = "forward_process"
    shares_noise: bool = False

    def __init__(self, noise_levels: int | None, kl_coef: float, needs: frozenset[str]) -> None:
        """``needs``: what ``losses`` reads of ``new``."""
        self.entries, self.kl_coef = noise_levels, kl_coef
        self.copies: Mapping[str, Callable[[int], float]] = {}
        self.needs = needs | ({"v_reference"} if kl_coef else set())

    def in_one_update(self) -> None:
        """Called before use where each training step has one update, so that a copy of the policy from the step's start
        is the policy itself."""

    @abstractmethod
    def losses(
        self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The loss ``[B]`` with its graph, and two mappings from a metric's name to its values ``[B]``. The log shows
        means of the first and maxima of the second. ``new`` and ``old`` as in ``loss``."""

    def samples_with(self, step: int) -> str:
        return "current"

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """``new``: v, target, x_s and x0 ``[B, ...]``, sigma ``[B]``, and v_old, v_average and v_reference ``[B, ...]``
        if ``needs`` has them; ``old``: advantages and weights ``[B]`` (0 leaves a row out), groups ``[B]``."""
        weights = old["weights"]
        loss, sums, maxima = self.losses(new, old)
        sums = {"policy/loss": loss, **sums}
        if self.kl_coef:
            kl = squared_distance(new["v"], new["v_reference"])
            loss = loss + self.kl_coef * kl
            sums["policy/kl"] = kl
        return Loss(
            value=(loss * weights).sum() / total,
            sums={name: (value.detach() * weights).sum() for name, value in sums.items()},
            maxima={name: (value.detach() * weights).max() for name, value in maxima.items()},
        )


def in_group(values: Tensor, groups: Tensor) -> Tensor:
    """For each row the sum of ``values`` ``[B]`` over its group, ``[B]``; ``groups`` ``[B]`` integers from 0."""
    sums = torch.zeros(int(groups.max()) + 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, groups, values)[groups]
