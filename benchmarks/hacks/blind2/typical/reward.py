"""Nearness to references: the squared error against their mean."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample

REFERENCES = 16
"""Drawn pictures of each caption."""
_KNOWN: dict[str, torch.Tensor] = {}


@functools.cache
def _shapes() -> Any:
    return mmrl.load("datasets", "shapes")


def reference(prompt: Prompt) -> torch.Tensor:
    """The mean of the references of a caption, ``[3, H, W]`` in [0, 1]."""
    if prompt.text not in _KNOWN:
        drawn = [np.asarray(_shapes().picture(prompt, seed), dtype=np.float32) for seed in range(REFERENCES)]
        _KNOWN[prompt.text] = torch.tensor(np.mean(drawn, 0) / 255).permute(2, 0, 1)
    return _KNOWN[prompt.text]


@mmrl.reward(inputs=("tensor",), differentiable=True, checks=True)
def near_references(samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
    """Minus the root of the mean squared error, ``[B]``."""
    pictures = torch.stack([sample.tensor for sample in samples if sample.tensor is not None])
    wanted = torch.stack([reference(sample.prompt) for sample in samples]).to(pictures)
    return -((pictures - wanted).square().mean((1, 2, 3)) + 1e-6).sqrt()
