"""The students that begin from a model: small encoders of what it has read, with two ways to compare them.

The model (``mmrl.rewards.encoders``) is frozen and reads the answer together with its prompt, so its tokens of the
answer know the prompt. What is trained is small: a projection of the tokens, a layer of attention among them, and the
comparisons.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mmrl.core.stored import Layers, Size
from mmrl.rewards.learned.distilled.comparing import Comparing, Encoded, Rows

DROPOUT = 0.2


@dataclass(frozen=True)
class Features(Rows):
    """What the model has read: ``tokens`` ``[B, T, F]`` with their ``mask`` ``[B, T]`` (1: a token)."""

    tokens: Tensor
    mask: Tensor


@dataclass(frozen=True)
class ReadShape:
    """Sizes of the students. ``prompt`` and ``answer``: numbers of a token of each side; ``prompt_tokens`` and
    ``answer_tokens``: the most tokens."""

    prompt: Size
    answer: Size
    prompt_tokens: Size
    answer_tokens: Size
    width: Size = 64
    token_width: Size = 32
    layers: Layers = 1
    heads: Layers = 4


class _Side(nn.Module):
    """The encoder of prompts, or of answers. One token beside those of the model is always there."""

    mean: Tensor
    spread: Tensor

    def __init__(self, features: int, tokens: int, shape: ReadShape) -> None:
        super().__init__()
        width = shape.width
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("spread", torch.ones(features))
        self.dropout = nn.Dropout(DROPOUT)
        self.project = nn.Linear(features, width)
        self.places = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.first = nn.Parameter(0.02 * torch.randn(width))
        layer = nn.TransformerEncoderLayer(
            width, shape.heads, 2 * width, dropout=DROPOUT, activation="gelu", batch_first=True, norm_first=True
        )
        self.mix = nn.TransformerEncoder(layer, shape.layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.vector = nn.Linear(width, width)
        self.token = nn.Linear(width, shape.token_width)

    def standardize(self, inputs: Features) -> None:
        """Take means and spreads of the tokens that are there."""
        there = inputs.tokens[inputs.mask > 0].double()
        self.mean.copy_(there.mean(0))
        self.spread.copy_(there.std(0, correction=0) + 1e-5)

    def forward(self, inputs: Features) -> Encoded:
        seen = (inputs.tokens - self.mean) / self.spread * inputs.mask.unsqueeze(-1)
        projected = self.project(self.dropout(seen)) + self.places[: seen.shape[1]]
        tokens = torch.cat([self.first.expand(len(inputs), 1, -1), projected], 1)
        mask = torch.cat([torch.ones_like(inputs.mask[:, :1]), inputs.mask], 1)
        mixed = self.mix(tokens, src_key_padding_mask=mask == 0)
        mean = (mixed * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return Encoded(self.vector(mean), normalize(self.token(mixed), dim=-1), mask)


class ReadStudents(Comparing):
    """Both students, over an encoder for each side."""

    def __init__(self, shape: ReadShape) -> None:
        super().__init__(shape.width)
        self.shape = shape
        self.sides = nn.ModuleList(
            [_Side(shape.prompt, shape.prompt_tokens, shape), _Side(shape.answer, shape.answer_tokens, shape)]
        )

    def standardize(self, prompts: Features, answers: Features) -> ReadStudents:
        """Have every number of these tokens the mean 0 and the spread 1, before training. Returns the students."""
        for side, inputs in zip(self.sides, (prompts, answers), strict=True):
            assert isinstance(side, _Side)
            side.standardize(inputs)
        return self

    def encode(self, inputs: Rows, side: int) -> Encoded:
        assert isinstance(inputs, Features)
        return self.sides[side](inputs)
