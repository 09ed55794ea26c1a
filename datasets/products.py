"""Products of two whole numbers of three digits, which a small model cannot compute in its head."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from mmrl.core.trajectory import Prompt

ANSWER = "answer:"
_HELD_OUT = 5
"""One product in so many is held out."""


def prompts(
    split: Literal["train", "heldout", "all"] = "train", *, count: int = 1000, seed: int = 0
) -> Sequence[Prompt]:
    """``count`` products of the split; ``seed`` chooses which. ``meta["answer"]`` is the product. A product is held out
    by its numbers alone, so no seed trains on one."""
    rng, found, seen = random.Random(seed), list[Prompt](), set[tuple[int, int]]()
    while len(found) < count:
        pair = rng.randint(100, 999), rng.randint(100, 999)
        held_out = sum(pair) % _HELD_OUT == 0
        if pair in seen or (split != "all" and held_out != (split == "heldout")):
            continue
        seen.add(pair)
        a, b = pair
        found.append(Prompt(f"products/{a}*{b}", f"What is {a} * {b}?", {"answer": str(a * b)}))
    return found
