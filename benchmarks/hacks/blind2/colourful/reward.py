"""Colourfulness: how far the pixels' opponent colours spread, and how far their mean is from grey."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

MEAN_WEIGHT = 0.3
"""Of Hasler and Suesstrunk (2003), "Measuring colourfulness in natural images"."""


@mmrl.reward(inputs=("tensor",), differentiable=True, checks=True)
def colourful(samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
    """The measure M3 of pictures in [0, 1], ``[B]``."""
    pictures = torch.stack([sample.tensor for sample in samples if sample.tensor is not None])
    red, green, blue = pictures.flatten(2).unbind(1)
    opponents = torch.stack([red - green, (red + green) / 2 - blue])
    spread = (opponents.var(-1).sum(0) + 1e-6).sqrt()
    mean = (opponents.mean(-1).square().sum(0) + 1e-6).sqrt()
    return spread + MEAN_WEIGHT * mean
