"""How well a sample agrees with its prompt, read from the other samples alone, without a label.

The samples that look like this one say which prompts such a sample is drawn for: their prompts vote, and the votes are
compared with the sample's own prompt. With looks ``x`` and prompts ``p`` of length 1 it is

    a_i = sum over j of softmax_j(x_i . x_j / T) (p_i . p_j)

for three temperatures ``T``. A red circle that was drawn for "a blue circle" looks like samples of other prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.rewards.learned.labels.graph import products

TEMPERATURES = (0.02, 0.05, 0.1)


@dataclass(frozen=True)
class Agreement:
    """``looks`` ``[N, L]`` and ``prompts`` ``[N, P]`` of the kept samples, rows of length 1; ``mean`` and ``spread``
    of their agreement at each temperature; ``kept``: their agreement ``[N, T]``, none of them votes for itself."""

    looks: Tensor
    prompts: Tensor
    mean: Tensor
    spread: Tensor
    kept: Tensor

    @classmethod
    def of(cls, looks: Tensor, prompts: Tensor) -> Agreement:
        """The agreement on the samples to keep."""
        found = votes(looks, prompts, looks, prompts, same=True)
        mean, spread = found.mean(0), found.std(0).clamp(min=1e-6)
        return cls(looks, prompts, mean, spread, (found - mean) / spread)

    def __call__(self, looks: Tensor, prompts: Tensor) -> Tensor:
        """The agreement ``[Q, T]`` of new samples: the kept ones vote."""
        return (votes(looks, prompts, self.looks, self.prompts) - self.mean) / self.spread

    def tensors(self) -> dict[str, Tensor]:
        return {f"agreement.{name}": tensor for name, tensor in vars(self).items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Agreement | None:
        """None where the samples had no prompts of their own. Raises ``KeyError``."""
        names = ("looks", "prompts", "mean", "spread", "kept")
        return cls(*(tensors[f"agreement.{name}"] for name in names)) if "agreement.looks" in tensors else None


def votes(looks: Tensor, prompts: Tensor, of_looks: Tensor, of_prompts: Tensor, *, same: bool = False) -> Tensor:
    """``a`` of the module's text for the samples ``looks`` and ``prompts``, by those of the others: ``[Q, T]``.
    ``same``: they are the same samples, and none votes for itself."""
    found: list[Tensor] = []
    for rows, cosines in products(looks, of_looks, same=same):
        alike = prompts[rows] @ of_prompts.T
        found.append(torch.stack([((cosines / t).softmax(1) * alike).sum(1) for t in TEMPERATURES], 1))
    return torch.cat(found)
