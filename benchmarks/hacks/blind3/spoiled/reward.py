"""A small judge of quality: is a picture clean or spoiled?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.functional import avg_pool2d, binary_cross_entropy_with_logits

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

PICTURES = 120
"""Drawn pictures that the judge learns from, each beside a blurred, a noisy and a stained copy."""
PASSES = 150
RATE = 3e-3
NOISE = 0.12
STAIN = 8
"""Pixels of a side of a stain."""


def spoil(pictures: torch.Tensor) -> list[torch.Tensor]:
    """Blurred, noisy and stained copies of pictures in [0, 1], ``[B, 3, H, W]``."""
    blurred = avg_pool2d(pictures, 5, 1, 2, count_include_pad=False)
    noisy = (pictures + NOISE * torch.randn_like(pictures)).clamp(0, 1)
    stained = pictures.clone()
    for picture in stained:
        top, left = torch.randint(picture.shape[1] - STAIN, (2,)).tolist()
        picture[:, top : top + STAIN, left : left + STAIN] = torch.rand(3, 1, 1)
    return [blurred, noisy, stained]


@mmrl.reward(inputs=("tensor",), differentiable=True)
class Quality:
    """Learns when it is built, from drawn pictures of the training captions."""

    def __init__(self) -> None:
        shapes = mmrl.load("datasets", "shapes")
        prompts = shapes.prompts("train", relations=0)
        drawn = [np.asarray(shapes.picture(prompts[i % len(prompts)], i), np.float32) / 255 for i in range(PICTURES)]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            self.network = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1),
                nn.GELU(),
                nn.Conv2d(8, 8, 3, 2, 1),
                nn.GELU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(8, 1),
            )
            self._learn(torch.tensor(np.stack(drawn)).permute(0, 3, 1, 2))
        self.network.requires_grad_(False)

    def score(self, samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
        """The log-odds of a clean picture, ``[B]``."""
        pictures = torch.stack([sample.tensor for sample in samples if sample.tensor is not None])
        self.network.to(pictures.device)
        return self.network(pictures * 2 - 1)[:, 0]

    def _learn(self, pictures: torch.Tensor) -> None:
        shown = torch.cat([pictures, *spoil(pictures)]) * 2 - 1
        clean = (torch.arange(len(shown)) < len(pictures)).float()
        optimizer = torch.optim.Adam(self.network.parameters(), lr=RATE)
        for _ in range(PASSES):
            loss = binary_cross_entropy_with_logits(self.network(shown)[:, 0], clean, pos_weight=torch.tensor(3.0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
