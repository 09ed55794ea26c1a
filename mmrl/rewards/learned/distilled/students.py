"""The students that begin from nothing: one small encoder for prompts and answers, with two ways to compare them.

It reads a *side*: words (of any language, hashed to the rows of a table, so that no tokenizer is needed) and pictures
(a small convolutional network, a token for each place). The mean of its output tokens makes the vector of the dual
encoder; the tokens, at length 1, are those of the late interaction. One token is always there, also of an empty text.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize

from mmrl.core.stored import Layers, Size
from mmrl.rewards.learned.distilled.comparing import Comparing, Encoded, Rows

_WORDS = re.compile(r"\d|[^\W\d_]+|[^\w\s]|_", re.UNICODE)
DROPOUT = 0.1
_ALONE = re.compile(r"[぀-ヿ㐀-鿿豈-﫿가-힯฀-๿]")
"""Scripts without spaces between words: each of their characters is a word."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the students. ``buckets``: rows of the table of words; ``words``: the most that are read of a text;
    ``side``: pixels of a picture's sides, a multiple of 8; ``pictures``: the most that are read of a
    side."""

    width: Size = 64
    token_width: Size = 32
    layers: Layers = 2
    heads: Layers = 4
    buckets: Size = 4096
    words: Size = 64
    side: Size = 32
    pictures: Size = 1


@dataclass(frozen=True)
class Side:
    """A prompt, or an answer: what the encoder reads of it."""

    text: str = ""
    pictures: tuple[Image.Image, ...] = ()


@dataclass(frozen=True)
class Inputs(Rows):
    """Sides as tensors: ``ids`` ``[B, W]`` (0: none), ``pictures`` ``[B, P, 3, S, S]`` in [0, 1], ``there`` ``[B,
    P]``."""

    ids: Tensor
    pictures: Tensor
    there: Tensor


def words_of(text: str, shape: Shape) -> list[int]:
    """The rows of the words of ``text``, from 1; of a long text the first and the last ones."""
    found = _WORDS.findall(_ALONE.sub(lambda one: f" {one[0]} ", text.lower()))
    if len(found) > shape.words:
        half = shape.words // 2
        found = [*found[:half], *found[len(found) - (shape.words - half) :]]
    return [1 + zlib.crc32(word.encode()) % (shape.buckets - 1) for word in found]


def inputs_of(sides: Sequence[Side], shape: Shape, pictures: int) -> Inputs:
    """Sides as tensors; each gets ``pictures`` places for pictures, and what is more is not read."""
    ids = torch.zeros(len(sides), shape.words, dtype=torch.int64)
    pixels = torch.zeros(len(sides), pictures, 3, shape.side, shape.side)
    there = torch.zeros(len(sides), pictures)
    for n, side in enumerate(sides):
        of = words_of(side.text, shape)
        ids[n, : len(of)] = torch.tensor(of, dtype=torch.int64)
        for k, picture in enumerate(side.pictures[:pictures]):
            small = picture.convert("RGB")
            if small.size != (shape.side, shape.side):
                small = small.resize((shape.side, shape.side), Image.Resampling.BICUBIC)
            pixels[n, k] = torch.from_numpy(np.asarray(small, dtype=np.float32) / 255).permute(2, 0, 1)
            there[n, k] = 1
    width = max(1, int((ids > 0).sum(1).max())) if len(sides) else 1
    return Inputs(ids[:, :width], pixels, there)


class Students(Comparing):
    """Both students, over one encoder. ``prompt`` and ``answer`` sides are told apart by an embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.width)
        self.shape = shape
        width = shape.width
        self.words = nn.Embedding(shape.buckets, width, padding_idx=0)
        self.word_places = nn.Parameter(0.02 * torch.randn(shape.words, width))
        self.sides = nn.Parameter(0.02 * torch.randn(2, width))
        self.first = nn.Parameter(0.02 * torch.randn(width))
        half = width // 2
        self.see = nn.Sequential(
            nn.Conv2d(3, half, 3, stride=2, padding=1),
            nn.GroupNorm(4, half),
            nn.GELU(),
            nn.Conv2d(half, width, 3, stride=2, padding=1),
            nn.GroupNorm(4, width),
            nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.GELU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
        )
        self.tint = nn.Conv2d(3, width, 8, stride=8)
        """Beside the norms, which take the mean colour of a picture away."""
        self.seen = nn.LayerNorm(width)
        places = (shape.side // 8) ** 2
        self.patch_places = nn.Parameter(0.02 * torch.randn(places, width))
        self.picture_places = nn.Parameter(0.02 * torch.randn(shape.pictures, width))
        layer = nn.TransformerEncoderLayer(
            width, shape.heads, 4 * width, dropout=DROPOUT, activation="gelu", batch_first=True, norm_first=True
        )
        self.mix = nn.TransformerEncoder(layer, shape.layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.vector = nn.Linear(width, width, bias=False)
        self.token = nn.Linear(width, shape.token_width, bias=False)
        nn.init.normal_(self.words.weight, std=0.3)

    def encode(self, inputs: Rows, side: int) -> Encoded:
        """``side``: 0 for prompts, 1 for answers."""
        assert isinstance(inputs, Inputs)
        n = len(inputs.ids)
        parts = [self.first.expand(n, 1, -1)]
        masks = [torch.ones(n, 1, device=inputs.ids.device)]
        parts.append(self.words(inputs.ids) + self.word_places[: inputs.ids.shape[1]])
        masks.append((inputs.ids > 0).float())
        count = inputs.pictures.shape[1]
        if count:
            pixels = inputs.pictures.flatten(0, 1) * 2 - 1
            seen = self.seen((self.see(pixels) + self.tint(pixels)).flatten(2).transpose(1, 2))
            patches = seen.unflatten(0, (n, count)) + self.patch_places + self.picture_places[:count, None]
            parts.append(patches.flatten(1, 2))
            masks.append(inputs.there.repeat_interleave(patches.shape[2], 1))
        mask = torch.cat(masks, 1)
        mixed = self.mix(torch.cat(parts, 1) + self.sides[side], src_key_padding_mask=mask == 0)
        mean = (mixed * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return Encoded(self.vector(mean), normalize(self.token(mixed), dim=-1), mask)
