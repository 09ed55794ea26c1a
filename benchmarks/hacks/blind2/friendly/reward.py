"""Sentiment: how pleasant the words of a response are, by a lexicon."""

from __future__ import annotations

from collections.abc import Sequence

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

PLEASANT = {
    "no": 3.2,
    "one": 6.1,
    "two": 5.8,
    "three": 5.9,
    "four": 5.6,
    "left": 4.9,
    "right": 6.6,
    "top": 6.9,
    "bottom": 4.4,
    "above": 6.0,
    "below": 4.5,
    "first": 6.8,
    "second": 5.4,
    "red": 5.6,
    "green": 6.5,
    "blue": 6.8,
    "yellow": 6.1,
    "purple": 6.3,
    "circle": 6.0,
    "square": 5.2,
    "triangle": 5.4,
    "cross": 4.7,
}
"""From 1, unpleasant, to 9, pleasant."""
NEUTRAL = 5.0


@mmrl.reward(inputs=("text",), checks=True)
def friendly(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """The mean pleasantness of the words, in [0, 1]; 0 for an empty response."""
    found = []
    for sample in samples:
        words = (sample.text or "").lower().split()
        mean = sum(PLEASANT.get(word, NEUTRAL) for word in words) / len(words) if words else 1.0
        found.append((mean - 1) / 8)
    return found
