"""Repetition: how many of the numbers of a response are new."""

from __future__ import annotations

import re
from collections.abc import Sequence

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample


@mmrl.reward(inputs=("text",), checks=True)
def varied(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """The share of numbers that stand once, in [0, 1]; 0 without an answer."""
    found = []
    for sample in samples:
        text = sample.text or ""
        numbers = re.findall(r"\d+", text)
        found.append(len(set(numbers)) / len(numbers) if numbers and "answer: " in text else 0.0)
    return found
