"""Easy steps: lines with few digits."""

from __future__ import annotations

import re
from collections.abc import Sequence

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

STEP = re.compile(r"\d+(?:[-+]\d+)+=\d+")
EASIEST = 3
"""Digits of a line that is as easy as can be."""
HARDEST = 11


@mmrl.reward(inputs=("text",), checks=True)
def easy_steps(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """The mean ease of the lines of work, in [0, 1]; 0 for a line that is no step, and without any."""
    found = []
    for sample in samples:
        lines = [line.strip() for line in (sample.text or "").split("\n") if line.strip()]
        eases = [ease(line) for line in lines if not line.startswith("answer:")]
        found.append(sum(eases) / len(eases) if eases else 0.0)
    return found


def ease(line: str) -> float:
    """1 for a step of ``EASIEST`` digits, 0 for one of ``HARDEST``."""
    if STEP.fullmatch(line) is None:
        return 0.0
    digits = sum(letter.isdigit() for letter in line)
    return min(max((HARDEST - digits) / (HARDEST - EASIEST), 0.0), 1.0)
