"""Composition: the rule of thirds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

THIRDS = (1 / 3, 2 / 3)
FAINT = 0.1
"""Distance from the background, in RGB of 0 to 1, that has no weight."""


@mmrl.reward(inputs=("tensor",), differentiable=True, checks=True)
def thirds(samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
    """Minus the distance of the centre from the nearest of the four points, in sides of the picture, ``[B]``."""
    pictures = torch.stack([sample.tensor for sample in samples if sample.tensor is not None])
    base = pictures.new_tensor([list(sample.prompt.meta["background"]) for sample in samples])[:, :, None, None] / 255
    weight = (((pictures - base).square().sum(1) + 1e-6).sqrt() - FAINT).clamp(min=0) + 1e-4
    found = []
    for axis in (1, 2):
        line = weight.sum(axis)
        places = (torch.arange(line.shape[1], device=line.device) + 0.5) / line.shape[1]
        centre = (line * places).sum(1) / line.sum(1)
        found.append(torch.stack([(centre - third).square() for third in THIRDS]).amin(0))
    return -(found[0] + found[1] + 1e-6).sqrt()
