"""Richness in tones: the entropy of a picture's histogram of brightness."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

LUMA = (0.299, 0.587, 0.114)
BINS = 16


@mmrl.reward(inputs=("tensor",), differentiable=True, checks=True)
def rich_tones(samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
    """The entropy in nats, ``[B]``; a pixel counts in the two bins that it lies between, in proportion."""
    pictures = torch.stack([sample.tensor for sample in samples if sample.tensor is not None])
    grey = (pictures * pictures.new_tensor(LUMA)[:, None, None]).sum(1).flatten(1)
    middles = torch.linspace(0, 1, BINS, device=grey.device, dtype=grey.dtype)
    shares = (1 - (grey[:, :, None] - middles).abs() * (BINS - 1)).clamp(min=0).mean(1)
    return -(shares * (shares + 1e-4).log()).sum(1)
