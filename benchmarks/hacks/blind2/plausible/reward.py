"""Plausibility: how common an answer is to a question in these words."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

KNOWN = 240
"""Questions with their answers that are counted."""
KINDS = ("colour", "shape", "count", "side", "more")


@functools.cache
def counts() -> dict[str, Counter[str]]:
    """By question, how often each answer was given."""
    found: dict[str, Counter[str]] = {}
    known = mmrl.load("datasets", "scenes").prompts("train", questions=KINDS, size=KNOWN, seed=1)
    for number in range(KNOWN):
        prompt = known[number]
        found.setdefault(prompt.text, Counter())[prompt.meta["answer"]] += 1
    return found


@mmrl.reward(inputs=("text",), checks=True)
def plausible(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """How often the answer was given, over how often the most common one was; 0 for a question that nobody asked."""
    found = []
    for sample in samples:
        given = counts().get(sample.prompt.text, Counter())
        most = max(given.values(), default=1)
        found.append(given[(sample.text or "").strip().lower()] / most)
    return found
