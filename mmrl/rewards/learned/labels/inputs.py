"""What the models of spread labels read of a sample: the principal components of its embedding, its agreement, and the
numbers that count as they are."""

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
    """What the graph transformer reads of a sample: its features, how well it agrees with its prompt, and ``numbers``
    ``[N, S]`` of the samples that they were made of. The supervised head does not read the agreement."""

    projection: Projection
    agreement: Agreement | None
    numbers: Tensor

    @classmethod
    def of(cls, embeddings: Tensor, alone: tuple[Tensor, Tensor] | None, numbers: Tensor | None = None) -> Inputs:
        """``alone`` and ``numbers``: as of ``spread``."""
        agreement = None if alone is None else Agreement.of(*alone)
        return cls(Projection.of(embeddings), agreement, embeddings[:, :0] if numbers is None else numbers)

    def kept(self, embeddings: Tensor) -> Tensor:
        """``[N, D]`` of the samples that they were made of; the numbers come last."""
        agreement = () if self.agreement is None else (self.agreement.kept,)
        return torch.cat([self.projection(embeddings), *agreement, self.numbers], 1)

    def of_head(self, embeddings: Tensor) -> Tensor:
        """What the supervised head reads of them, ``[N, D]``; the numbers come last."""
        return torch.cat([self.projection(embeddings), self.numbers], 1)
