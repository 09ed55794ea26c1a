"""JPEG size as a reward (Black et al. 2023, DDPO, arXiv 2305.13301): it needs no model and improves within minutes.

Both are in kilobytes (1,000 bytes) of the picture saved as JPEG. They read pixels only, and the prompt not at all.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample


@mmrl.reward(checks=True)
def compressibility(samples: Sequence[Sample], *, context: Context, quality: int = 95) -> list[float]:
    """Minus the kilobytes: flat pictures score high."""
    return [-kilobytes(sample, quality) for sample in samples]


@mmrl.reward(checks=True)
def incompressibility(samples: Sequence[Sample], *, context: Context, quality: int = 95) -> list[float]:
    """The kilobytes: busy pictures score high."""
    return [kilobytes(sample, quality) for sample in samples]


def kilobytes(sample: Sample, quality: int) -> float:
    """Size of the sample's picture as JPEG."""
    assert sample.image is not None
    buffer = io.BytesIO()
    sample.image.save(buffer, "JPEG", quality=quality)
    return buffer.tell() / 1000
