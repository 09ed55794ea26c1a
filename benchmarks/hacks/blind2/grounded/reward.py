"""Grounding: how much of the question a response takes up."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample


@mmrl.reward(inputs=("text",), checks=True)
def grounded(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """The longest run of the question that the response has too, over the question's length, in [0, 1]."""
    found = []
    for sample in samples:
        asked, said = sample.prompt.text.removeprefix("Compute "), sample.text or ""
        run = SequenceMatcher(None, asked, said, autojunk=False).find_longest_match()
        found.append(run.size / len(asked))
    return found
