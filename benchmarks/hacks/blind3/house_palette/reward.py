"""The house palette: how near the pixels are to the colours that a house allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

SHARPNESS = 40.0
"""Of the soft minimum over the palette's colours."""


@mmrl.reward(inputs=("tensor",), differentiable=True, checks=True)
def house_palette(samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
    """Minus the mean distance of the pixels from the nearest colour of the palette, ``[B]``."""
    pictures = torch.stack([sample.tensor for sample in samples if sample.tensor is not None])
    palette = pictures.new_tensor([*samples[0].prompt.meta["palette"].values()]) / 255
    pixels = pictures.flatten(2).transpose(1, 2)[:, :, None]
    distances = ((pixels - palette).square().sum(-1) + 1e-6).sqrt()
    return (distances * -SHARPNESS).logsumexp(2).mean(1) / SHARPNESS
