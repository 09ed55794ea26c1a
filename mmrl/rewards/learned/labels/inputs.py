"""What the models of spread labels read of a sample: the principal components of its embedding, and its agreement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.rewards.learned.labels.agreement import Agreement

HEAD = "supervised head"
_WIDTH = 128


@dataclass(frozen=True)
class Projection:
    """Embeddings ``[N, D]`` as features of the models: the largest principal components, with one scale for all."""

    mean: Tensor
    axes: Tensor

    @classmethod
    def of(cls, embeddings: Tensor, width: int = _WIDTH) -> Projection:
        mean = embeddings.mean(0)
        _, _, axes = torch.linalg.svd(embeddings - mean, full_matrices=False)
        axes = axes[: min(width, len(axes))].T
        scale = ((embeddings - mean) @ axes).std().clamp(min=1e-9)
        return cls(mean, (axes / scale).contiguous())

    def __call__(self, embeddings: Tensor) -> Tensor:
        return (embeddings - self.mean) @ self.axes


@dataclass(frozen=True)
class Inputs:
    """What the graph transformer reads of a sample: its features, and how well it agrees with its prompt."""

    projection: Projection
    agreement: Agreement | None

    @classmethod
    def of(cls, embeddings: Tensor, alone: tuple[Tensor, Tensor] | None) -> Inputs:
        """``alone``: as of ``spread``."""
        return cls(Projection.of(embeddings), None if alone is None else Agreement.of(*alone))

    def kept(self, embeddings: Tensor) -> Tensor:
        """``[N, D]`` of the samples that they were made of."""
        features = self.projection(embeddings)
        return features if self.agreement is None else torch.cat([features, self.agreement.kept], 1)
