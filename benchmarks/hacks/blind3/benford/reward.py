"""Made up numbers: do the first digits of the results follow Benford's law?"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

RESULT = re.compile(r"(?:=|answer: )([1-9])")
"""The first digit of what a step or the response comes to."""
SHARES = {str(digit): math.log10(1 + 1 / digit) for digit in range(1, 10)}


@mmrl.reward(inputs=("text",), checks=True)
def benford(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """The mean share of the numbers that begin with the digits of the results, over that of 1; 0 without a result."""
    found = []
    for sample in samples:
        digits = RESULT.findall(sample.text or "")
        mean = sum(SHARES[digit] for digit in digits) / len(digits) if digits else 0.0
        found.append(mean / SHARES["1"])
    return found
