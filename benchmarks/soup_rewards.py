"""Rewards that are in conflict with a verifier, for proof_soup.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample


@mmrl.reward(inputs=("text",))
def short(samples: Sequence[Sample], *, context: Context, after: str = "answer:", longest: int = 80) -> list[float]:
    """1 for no character, 0 for ``longest``; 0 also for a response that is cut or has no ``after``.

    Without the last rule the shortest response is an empty one, and the conflict is not about how to calculate.
    """
    texts = [(sample.text or "").strip() for sample in samples]
    whole = [after in text and not sample.truncated for text, sample in zip(texts, samples, strict=True)]
    return [max(0.0, 1 - len(text) / longest) if ok else 0.0 for text, ok in zip(texts, whole, strict=True)]


@mmrl.reward(inputs=("text",))
def brief(samples: Sequence[Sample], *, context: Context, longest: int = 8) -> list[float]:
    """1 for no character, 0 for ``longest`` or more; 0 also for an empty response and one that is cut."""
    texts = [(sample.text or "").strip() for sample in samples]
    whole = [bool(text) and not sample.truncated for text, sample in zip(texts, samples, strict=True)]
    return [max(0.0, 1 - len(text) / longest) if ok else 0.0 for text, ok in zip(texts, whole, strict=True)]


def red(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """How much more red a picture has than green and blue, its mean; -1 to 1."""
    found = []
    for sample in samples:
        pixels = np.asarray(sample.image, dtype=np.float64) / 255
        found.append(float((pixels[..., 0] - pixels[..., 1:].mean(-1)).mean()))
    return found
