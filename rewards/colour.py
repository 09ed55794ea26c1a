"""Colour statistics as rewards, for experiments; ``target`` is the smallest reward with a gradient.

``rgb`` is three numbers from 0 to 255.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample
from mmrl.core.transfer import to_device

if TYPE_CHECKING:
    import numpy as np
    import torch


@mmrl.reward(checks=True)
def brightness(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """Mean luma (Rec. 601), 0 for black to 1 for white."""
    return [float((_pixels(s) @ [0.299, 0.587, 0.114]).mean()) / 255 for s in samples]


@mmrl.reward(checks=True)
def saturation(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """Mean saturation as in HSV, 0 for grey to 1 for pure colours."""
    found = []
    for sample in samples:
        pixels = _pixels(sample)
        high = pixels.max(-1)
        found.append(float(((high - pixels.min(-1)) / high.clip(min=1)).mean()))
    return found


@mmrl.reward(checks=True)
def share(samples: Sequence[Sample], *, context: Context, rgb: Sequence[float], tolerance: float = 60.0) -> list[float]:
    """Share of the pixels no further than ``tolerance`` (Euclidean, in 0..255 RGB) from ``rgb``; 0 to 1."""
    return [float((((_pixels(s) - list(rgb)) ** 2).sum(-1) <= tolerance**2).mean()) for s in samples]


@mmrl.reward(inputs=("tensor",), differentiable=True, checks=True)
def target(samples: Sequence[Sample], *, context: Context, rgb: Sequence[float]) -> torch.Tensor:
    """Minus the mean squared distance of a picture's mean colour from ``rgb``, both in [0, 1]; 0 is best."""
    import torch

    pictures = torch.stack([sample.tensor for sample in samples if sample.tensor is not None])
    wanted = to_device(torch.tensor(list(rgb), dtype=pictures.dtype), pictures.device) / 255
    return -(pictures.mean((2, 3)) - wanted).square().mean(1)


def _pixels(sample: Sample) -> np.ndarray:
    import numpy as np

    return np.asarray(sample.image, dtype=np.float64)
