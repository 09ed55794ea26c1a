"""Balance: how alike the left and the right half of a picture are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample


@mmrl.reward(inputs=("tensor",), differentiable=True, checks=True)
def balanced(samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
    """The correlation of the pixels with those of the mirrored picture, ``[B]``, in [-1, 1]."""
    pictures = torch.stack([sample.tensor for sample in samples if sample.tensor is not None])
    centred = pictures - pictures.mean((2, 3), keepdim=True)
    shared = (centred * centred.flip(3)).sum((1, 2, 3))
    return shared / (centred.square().sum((1, 2, 3)) + 1e-3)
