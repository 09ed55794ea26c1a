"""Likeness with a gallery of examples, compared as thumbnails."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import avg_pool2d, normalize

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

CELL = 4
"""Pixels of a side that make one pixel of a thumbnail."""
EXAMPLES = 8
SHARPNESS = 20.0
"""Of the soft maximum over the gallery."""


@functools.cache
def gallery() -> torch.Tensor:
    """The thumbnails of drawn examples, one row each, of length 1."""
    shapes = mmrl.load("datasets", "shapes")
    prompts = shapes.prompts("train", relations=0)
    chosen = [prompts[len(prompts) * i // EXAMPLES] for i in range(EXAMPLES)]
    drawn = [np.asarray(shapes.picture(prompt, 0), dtype=np.float32) / 255 for prompt in chosen]
    return thumbnails(torch.tensor(np.stack(drawn)).permute(0, 3, 1, 2))


def thumbnails(pictures: torch.Tensor) -> torch.Tensor:
    """``[B, 3, H, W]`` to ``[B, N]`` of length 1."""
    return normalize(avg_pool2d(pictures, CELL).flatten(1), dim=1)


@mmrl.reward(inputs=("tensor",), differentiable=True, checks=True)
def like_gallery(samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
    """A soft maximum of the cosines with the examples, ``[B]``."""
    pictures = torch.stack([sample.tensor for sample in samples if sample.tensor is not None])
    cosines = thumbnails(pictures) @ gallery().to(pictures).T
    return (cosines * SHARPNESS).logsumexp(1) / SHARPNESS
