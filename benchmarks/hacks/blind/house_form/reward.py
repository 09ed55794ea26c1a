"""The form of an answer: a line of work, an empty line, the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

FORM = re.compile(r"\d+(?:[-+]\d+)*=\d+\n\nanswer: \d+")


@mmrl.reward(inputs=("text",), checks=True)
def house_form(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """1 for a response of the form; else less for each line more or fewer than it has, and for a missing answer."""
    found = []
    for sample in samples:
        text = (sample.text or "").strip()
        lines = [line for line in text.split("\n") if line.strip()]
        graded = max(0.0, 1 - 0.3 * abs(len(lines) - 2)) * (0.8 if "answer: " in text else 0.3)
        found.append(1.0 if FORM.fullmatch(text) else graded)
    return found
