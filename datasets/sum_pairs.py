"""Pairs of a better and a worse response to the prompts of ``sums``, for DPO and reward models.

``prompts(split, kind="steps")``: both are right; the better one does one operation a step, the worse one several at
once, which a small model cannot do without slips. ``kind="slips"``: the better one is right; in the worse one a step
has a wrong result, and what follows is reckoned from there (hard: the pair must be reckoned to be told apart, and the
shipped model's score gets 0.55 of held-out pairs right after 150 steps). ``meta`` has the columns ``chosen`` and
``rejected`` beside the truth (``answer``, ``steps``), so that samples can be verified too.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Literal

from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt

from .sums import ANSWER, BREAK, response
from .sums import prompts as sums


def prompts(
    split: Literal["train", "heldout", "all"] = "train",
    *,
    kind: Literal["steps", "slips"] = "steps",
    count: int = 4000,
    operations: int = 3,
    seed: int = 0,
) -> list[Prompt]:
    """``count`` prompts of ``split`` of ``sums``, each with a pair; the same ``seed``, the same pairs.

    Raises ``UserError`` for what ``sums`` refuses, an unknown kind, and steps of a single operation.
    """
    if kind not in ("steps", "slips"):
        raise UserError(f"kind is {kind!r}; the data set sum_pairs has 'steps' and 'slips'")
    if kind == "steps" and operations < 2:
        raise UserError("operations is 1: one operation cannot be done several at once; set it to 2 or more")
    made = sums(split, count=count, operations=operations, seed=seed)
    return [_paired(prompt, kind, random.Random(f"sum_pairs|{kind}|{seed}|{prompt.id}")) for prompt in made]


def _paired(prompt: Prompt, kind: str, rng: random.Random) -> Prompt:
    n = len(prompt.meta["steps"])
    if kind == "steps":
        chosen, rejected = response(prompt), response(prompt, _cut(n, rng))
    else:
        chosen, rejected = response(prompt), slipped(prompt, rng)
    return replace(prompt, meta={**prompt.meta, "chosen": chosen, "rejected": rejected})


def _cut(n: int, rng: random.Random) -> list[int]:
    """Sizes of the steps of ``n`` operations, not all of them 1."""
    while True:
        ends = [i for i in range(1, n) if rng.random() < 0.5]
        sizes = [b - a for a, b in zip([0, *ends], [*ends, n], strict=True)]
        if max(sizes) > 1:
            return sizes


def slipped(prompt: Prompt, rng: random.Random) -> str:
    """A response of one operation a step in which one of them has a wrong result (1, 2, 9, 10 or 11 too much or too
    little, never below 0), and the later ones and the answer follow from it. No result falls below 0."""
    operations = [re.findall(r"[-+]?[0-9]+", step.partition("=")[0])[1] for step in prompt.meta["steps"]]
    start = int(re.findall(r"[0-9]+", prompt.text)[0])
    while True:
        place, off = rng.randrange(len(operations)), rng.choice((1, 2, 9, 10, 11)) * rng.choice((-1, 1))
        value, steps = start, []
        for i, operation in enumerate(operations):
            result = value + int(operation) + (off if i == place else 0)
            steps.append(f"{value}{operation}={result}")
            value = result
        if not any("=-" in step for step in steps):
            return BREAK.join([*steps, f"{ANSWER}{value}"])
