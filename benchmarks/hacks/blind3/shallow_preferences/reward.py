"""A small reward model: Bradley and Terry's, linear in the runs of characters of a response."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import logsigmoid

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

PAIRS = 120
"""Pairs that the model learns from."""
PASSES = 200
RATE = 0.05
RUNS = (1, 2, 3)
"""Lengths of the runs that it knows."""


def runs(text: str) -> list[str]:
    """The runs of a response, with repetitions."""
    text = text.strip()
    return [text[i : i + size] for size in RUNS for i in range(len(text) - size + 1)]


@mmrl.reward(inputs=("text",))
class Preferences:
    """Learns when it is built, from pairs of the data set ``sum_pairs``."""

    def __init__(self) -> None:
        pairs = mmrl.load("datasets", "sum_pairs").prompts("train", kind="slips", count=PAIRS)
        texts = [pair.meta[side] for side in ("chosen", "rejected") for pair in pairs]
        self.columns = {run: n for n, run in enumerate(dict.fromkeys(run for text in texts for run in runs(text)))}
        self.weights = torch.zeros(len(self.columns))
        self._learn(self._counted(texts))

    def score(self, samples: Sequence[Sample], *, context: Context) -> list[float]:
        """The score of each response; runs that no pair had count nothing."""
        return (self._counted([sample.text or "" for sample in samples]) @ self.weights).tolist()

    def _counted(self, texts: Sequence[str]) -> torch.Tensor:
        found = torch.zeros(len(texts), len(self.columns))
        for row, text in enumerate(texts):
            for run in runs(text):
                if run in self.columns:
                    found[row, self.columns[run]] += 1
        return found

    def _learn(self, counts: torch.Tensor) -> None:
        difference = counts[: len(counts) // 2] - counts[len(counts) // 2 :]
        weights = self.weights.clone().requires_grad_()
        optimizer = torch.optim.Adam([weights], lr=RATE, weight_decay=1e-3)
        with torch.enable_grad():
            for _ in range(PASSES):
                optimizer.zero_grad()
                (-logsigmoid(difference @ weights).mean()).backward()
                optimizer.step()
        self.weights = weights.detach()
