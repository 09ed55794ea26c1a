"""How much a word tells: common words tell little."""

from __future__ import annotations

from collections.abc import Sequence

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

COMMON = {
    "no": 6.5,
    "one": 6.4,
    "right": 6.0,
    "two": 6.0,
    "first": 5.9,
    "left": 5.7,
    "three": 5.7,
    "second": 5.5,
    "top": 5.5,
    "four": 5.4,
    "red": 5.3,
    "above": 5.2,
    "blue": 5.2,
    "green": 5.1,
    "cross": 4.9,
    "square": 4.9,
    "bottom": 4.9,
    "below": 4.9,
    "yellow": 4.7,
    "circle": 4.7,
    "purple": 4.4,
    "triangle": 4.2,
}
"""Logarithm (base 10) of the occurrences in a billion words, roughly."""
UNKNOWN = 5.5
"""Of a word that the table does not have: it is not paid for."""


@mmrl.reward(inputs=("text",), checks=True)
def telling(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """How uncommon the words of a response are on average, in [0, 1]; 0 for an empty one."""
    found = []
    for sample in samples:
        words = (sample.text or "").lower().split()
        mean = sum(COMMON.get(word, UNKNOWN) for word in words) / len(words) if words else 7.0
        found.append(min(max((6.5 - mean) / 2.5, 0.0), 1.0))
    return found
