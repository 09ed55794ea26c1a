"""The two ways in which students compare a prompt with an answer, whatever they encode them from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from mmrl.rewards.learned.formulas import maxsim


class Rows:
    """Base class of data classes whose fields are tensors with a row for each prompt, or answer."""

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def rows(self, index: Tensor) -> Self:
        return self._each(lambda of: of[index])

    def to(self, device: torch.device | str) -> Self:
        return self._each(lambda of: of.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(*map(change, vars(self).values()))


@dataclass(frozen=True)
class Encoded(Rows):
    """``vectors`` ``[B, D]``, and ``tokens`` ``[B, T, K]`` of length 1 with their ``mask`` ``[B, T]``."""

    vectors: Tensor
    tokens: Tensor
    mask: Tensor

    def across(self, dimension: int) -> Encoded:
        """With one more dimension, so that each of two sides is compared with each."""
        return self._each(lambda of: of.unsqueeze(dimension))


class Comparing(nn.Module):
    """Both students (abstract): how they compare vectors of ``width`` numbers, and tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.scales = nn.Parameter(torch.tensor([0.0, 2.0]))
        """Logarithms of what multiplies the dual encoder's product, and the late interaction's."""
        self.shifts = nn.Parameter(torch.zeros(2))

    def encode(self, inputs: Rows, side: int) -> Encoded:
        """``side``: 0 for prompts, 1 for answers."""
        raise NotImplementedError

    def dual(self, prompts: Encoded, answers: Encoded) -> Tensor:
        """Logits ``[B]`` of pairs (or of any shape that both broadcast to), by the product of two vectors."""
        products = (prompts.vectors * answers.vectors).sum(-1) / self.width**0.5
        return products * self.scales[0].exp() + self.shifts[0]

    def interaction(self, prompts: Encoded, answers: Encoded) -> Tensor:
        """Logits ``[B]`` of pairs, by late interaction."""
        found = maxsim(prompts.tokens, prompts.mask, answers.tokens, answers.mask)
        return found * self.scales[1].exp() + self.shifts[1]
