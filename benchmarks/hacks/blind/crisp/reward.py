"""Sharpness: how steeply brightness changes from one pixel to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

LUMA = (0.299, 0.587, 0.114)


@mmrl.reward(inputs=("tensor",), differentiable=True, checks=True)
def crisp(samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
    """The mean length of the gradient of brightness, ``[B]``."""
    pictures = torch.stack([sample.tensor for sample in samples if sample.tensor is not None])
    grey = (pictures * pictures.new_tensor(LUMA)[:, None, None]).sum(1)
    across = grey[:, :-1, 1:] - grey[:, :-1, :-1]
    down = grey[:, 1:, :-1] - grey[:, :-1, :-1]
    return (across.square() + down.square() + 1e-6).sqrt().mean((1, 2))
