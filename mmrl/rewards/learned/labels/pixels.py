"""Embeddings of pictures, clips and texts without a model: what is always there, and the same everywhere.

A picture is what it shows at a coarse grid: the colours of 8 x 8 fields, how edges run in 4 x 4 fields (histograms of
oriented gradients, Dalal and Triggs 2005), and how much of it has which colour. A clip is the mean of its frames'
embeddings and what changes between them. A text is its words, and its pairs of words, hashed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from mmrl.rewards.learned.labels.items import FRAMES

SIDE, FIELDS, EDGE_FIELDS, DIRECTIONS, SHADES = 32, 8, 4, 8, 4
WORDS = 256
_WORD = re.compile(r"\d|[^\W\d_]+|[^\w\s]", re.UNICODE)


def of_pictures(pictures: Sequence[Image.Image]) -> Tensor:
    """``[B, 384]``, float32; each of the three parts has length 1."""
    small = [one.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX) for one in pictures]
    pixels = torch.from_numpy(np.stack([np.asarray(one, dtype=np.float32) / 255 for one in small]))
    each = SIDE // FIELDS
    colours = pixels.unflatten(2, (FIELDS, each)).unflatten(1, (FIELDS, each)).mean((2, 4)).flatten(1)
    parts = [colours - colours.mean(1, keepdim=True), _edges(pixels), _shades(pixels)]
    return torch.cat([normalize(part, dim=1) for part in parts], 1)


def _edges(pixels: Tensor) -> Tensor:
    """How strong the edges of each direction are in each field, ``[B, 128]``; that of the strongest colour counts."""
    across = torch.zeros_like(pixels)
    down = torch.zeros_like(pixels)
    across[:, :, 1:-1] = pixels[:, :, 2:] - pixels[:, :, :-2]
    down[:, 1:-1] = pixels[:, 2:] - pixels[:, :-2]
    strength, colour = (across.square() + down.square()).max(-1)
    across, down = (one.gather(-1, colour.unsqueeze(-1)).squeeze(-1) for one in (across, down))
    angle = torch.atan2(down, across).remainder(torch.pi) / torch.pi * DIRECTIONS
    low, share = angle.floor().long(), angle.frac()
    bins = torch.zeros(*angle.shape, DIRECTIONS)
    for place, weight in ((low % DIRECTIONS, 1 - share), ((low + 1) % DIRECTIONS, share)):
        bins.scatter_add_(-1, place.unsqueeze(-1), (strength.sqrt() * weight).unsqueeze(-1))
    each = SIDE // EDGE_FIELDS
    return bins.unflatten(2, (EDGE_FIELDS, each)).unflatten(1, (EDGE_FIELDS, each)).sum((2, 4)).flatten(1)


def _shades(pixels: Tensor) -> Tensor:
    """The square root of the share of each of 64 colours, ``[B, 64]``."""
    levels = (pixels * SHADES).long().clamp(max=SHADES - 1)
    numbers = (levels[..., 0] * SHADES + levels[..., 1]) * SHADES + levels[..., 2]
    counts = torch.zeros(len(pixels), SHADES**3).scatter_add_(
        1, numbers.flatten(1), torch.ones(len(pixels), SIDE * SIDE)
    )
    return (counts / (SIDE * SIDE)).sqrt()


def of_clips(clips: Sequence[Sequence[Image.Image]]) -> Tensor:
    """``[B, 768]``: of up to 8 frames at even distances the mean embedding, and the mean change from one to the
    next."""
    rows: list[Tensor] = []
    for frames in clips:
        count = min(FRAMES, len(frames))
        chosen = [frames[n * (len(frames) - 1) // max(1, count - 1)] for n in range(count)]
        each = of_pictures(chosen)
        moves = each.diff(dim=0).abs().mean(0) if count > 1 else torch.zeros(each.shape[1])
        rows.append(torch.cat([each.mean(0), moves]))
    return torch.stack(rows)


def of_texts(texts: Sequence[str]) -> Tensor:
    """``[B, 256]``, of length 1; 0 of an empty text."""
    counts = torch.zeros(len(texts), WORDS)
    for n, text in enumerate(texts):
        words = _WORD.findall(text.lower())
        for word in [*words, *(f"{a} {b}" for a, b in pairwise(words))]:
            digest = zlib.crc32(word.encode("utf-8", "replace"))
            counts[n, digest % WORDS] += 1 if digest >> 31 else -1
    return normalize(counts.sign() * counts.abs().sqrt(), dim=1)
