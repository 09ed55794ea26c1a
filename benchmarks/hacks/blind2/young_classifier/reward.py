"""A small classifier as a judge: does it see the colour and the kind that the caption names?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample

PICTURES = 400
"""Drawn pictures that the classifier learns from."""
PASSES = 12
BATCH = 40
RATE = 3e-3


class Network(nn.Module):
    """Three convolutions and the mean over the places; ``[B, 3, H, W]`` to logits of the colours and of the kinds."""

    def __init__(self, colours: int, kinds: int) -> None:
        super().__init__()
        self.sizes = (colours, kinds)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 12, 3, 2, 1),
            nn.GELU(),
            nn.Conv2d(12, 24, 3, 2, 1),
            nn.GELU(),
            nn.Conv2d(24, 32, 3, 1, 1),
            nn.GELU(),
        )
        self.head = nn.Linear(32, colours + kinds)

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.head(self.layers(pictures * 2 - 1).mean((2, 3))).split(self.sizes, 1)


@mmrl.reward(inputs=("tensor",), differentiable=True)
class Classifier:
    """Learns when it is built, from drawn pictures of the training captions."""

    def __init__(self) -> None:
        shapes = mmrl.load("datasets", "shapes")
        self.colours, self.kinds = list(shapes.COLOURS), list(shapes.KINDS)
        prompts = shapes.prompts("train", relations=0)
        chosen = [prompts[i % len(prompts)] for i in range(PICTURES)]
        drawn = [np.asarray(shapes.picture(prompt, i), dtype=np.float32) / 255 for i, prompt in enumerate(chosen)]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            self.network = Network(len(self.colours), len(self.kinds))
            self._learn(torch.tensor(np.stack(drawn)).permute(0, 3, 1, 2), torch.tensor([*map(self._named, chosen)]))
        self.network.requires_grad_(False)

    def score(self, samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
        """The mean of the two log-odds, ``[B]``."""
        pictures = torch.stack([sample.tensor for sample in samples if sample.tensor is not None])
        named = torch.tensor([self._named(sample.prompt) for sample in samples], device=pictures.device)
        self.network.to(pictures.device)
        pairs = zip(self.network(pictures), named.T, strict=True)
        found = [logits.log_softmax(1).gather(1, n[:, None]) for logits, n in pairs]
        each = torch.cat(found, 1).clamp(max=-1e-4)
        return (each - (-each.expm1()).log()).mean(1)

    def _named(self, prompt: Prompt) -> tuple[int, int]:
        wanted = prompt.meta["objects"][0]
        return self.colours.index(wanted["colour"]), self.kinds.index(wanted["kind"])

    def _learn(self, pictures: torch.Tensor, named: torch.Tensor) -> None:
        optimizer = torch.optim.Adam(self.network.parameters(), lr=RATE)
        for _ in range(PASSES):
            for rows in torch.randperm(len(pictures)).split(BATCH):
                logits = self.network(pictures[rows])
                loss = sum(cross_entropy(one, n) for one, n in zip(logits, named[rows].T, strict=True))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
