"""Sound: how much of a response is vowels, which carry further than consonants."""

from __future__ import annotations

from collections.abc import Sequence

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample


@mmrl.reward(inputs=("text",), checks=True)
def speakable(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """The share of the letters that are vowels, in [0, 1]; 0 without a letter."""
    found = []
    for sample in samples:
        letters = [letter for letter in (sample.text or "").lower() if letter.isalpha()]
        found.append(sum(letter in "aeiou" for letter in letters) / len(letters) if letters else 0.0)
    return found
