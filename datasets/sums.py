"""Sums in several steps, as text: a small reasoning task with a checkable answer and checkable steps.

A prompt asks for a chain of additions and subtractions:

    Compute 47+86-25+9

A response does one operation a step or several at once, steps separated by a blank line, and then says the answer:

    47+86=133

    133-25+9=117

    answer: 117

``prompts(split)`` gives prompts with the truth in ``meta`` (what a verifier may know): ``answer``, and ``steps`` of one
operation each. ``response`` writes a right response of any such cut; ``wrong_steps`` is the truth about the steps of
one. A fixed fifth of all chains is held out: never sampled in RL.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt
from mmrl.data.records import check_split, is_held_out

PREFIX = "Compute "
ANSWER = "answer: "
BREAK = "\n\n"
"""Between two steps, and between the last of them and the answer."""
_EQUATION = re.compile(r"(N)((?:[-+]N)+)=(N)".replace("N", "(?:0|[1-9][0-9]{0,5})"))


def prompts(
    split: Literal["train", "heldout", "all"] = "train", *, count: int = 4000, operations: int = 3, seed: int = 0
) -> list[Prompt]:
    """``count`` different chains of ``split`` with ``operations`` operations each; the same ``seed``, the same chains.

    ``all`` ignores the split: for pretraining. Raises ``UserError`` for an unknown split or a number out of range.
    """
    check_split(split, "the data set sums has", ("train", "heldout", "all"))
    if not 1 <= operations <= 8:
        raise UserError(f"operations is {operations}; a chain has 1 to 8 of them")
    most = 1000 if operations == 1 else 1_000_000
    if not 1 <= count <= most:
        raise UserError(f"count is {count}; there are 1 to {most:,} chains of {operations} operations to take")
    return list(_chains(split, count, operations, seed))


@lru_cache(maxsize=4)  # a run makes the prompts of its plan again
def _chains(split: str, count: int, operations: int, seed: int) -> tuple[Prompt, ...]:
    rng = random.Random(f"sums|{split}|{operations}|{seed}")
    found: dict[str, Prompt] = {}
    while len(found) < count:
        prompt = _prompt(rng, operations)
        if split == "all" or is_held_out(prompt.text) == (split == "heldout"):
            found.setdefault(prompt.text, prompt)
    return tuple(found.values())


def response(prompt: Prompt, sizes: Sequence[int] | None = None) -> str:
    """A right response to a prompt of this data set; ``sizes``: the operations of each step, None: one a step.

    Raises ``ValueError`` where the sizes are not those of the prompt's operations.
    """
    steps = prompt.meta["steps"]
    sizes = [1] * len(steps) if sizes is None else sizes
    if sum(sizes) != len(steps) or min(sizes) < 1:
        raise ValueError(f"sizes {list(sizes)} do not cut {len(steps)} operations into steps")
    equations = [found for found in map(_EQUATION.fullmatch, steps) if found]
    parts, done = [], 0
    for size in sizes:
        taken = equations[done : done + size]
        parts.append(f"{taken[0][1]}{''.join(one[2] for one in taken)}={taken[-1][3]}")
        done += size
    return BREAK.join([*parts, ANSWER + prompt.meta["answer"]])


def wrong_steps(prompt: Prompt, text: str) -> list[int]:
    """The steps of the response ``text`` that are wrong, numbered from 1: what stands between blank lines is a step,
    and the answer is the last.

    Each is judged on its own merits: it must take the result of the step before it as written there, apply the
    operations that the prompt has at this place (one or more), and be true. So a slip is wrong once, and what follows
    from it is not. Operations that no step has done are the answer's to do.
    """
    start, *operations = re.findall(r"[-+]?[0-9]+", prompt.text)
    result: str | None = start
    *steps, answer = [step.strip() for step in re.split(r"\n\s*\n", text) if step.strip()] or [""]
    wrong = []
    for number, step in enumerate(steps, start=1):
        match = _EQUATION.fullmatch(step)
        taken = re.findall(r"[-+][0-9]+", match[2]) if match else []
        follows = match is not None and match[1] == result and taken == operations[: len(taken)]
        if match is None or not follows or int(match[1]) + sum(map(int, taken)) != int(match[3]):
            wrong.append(number)
        result = match[3] if match else None
        operations = operations[max(len(taken), 1) :]
    if result is None or answer != f"{ANSWER}{int(result) + sum(map(int, operations))}":
        wrong.append(len(steps) + 1)
    return wrong


def _prompt(rng: random.Random, operations: int) -> Prompt:
    """A random chain: numbers of at most two digits, no result below 0."""
    value = rng.randint(10, 99)
    expression, steps = str(value), []
    for _ in range(operations):
        sign = rng.choice("+-") if value >= 2 else "+"
        operand = rng.randint(2, 99 if sign == "+" else min(99, value))
        result = value + operand if sign == "+" else value - operand
        steps.append(f"{value}{sign}{operand}={result}")
        expression += f"{sign}{operand}"
        value = result
    return Prompt(f"sums/{expression}", PREFIX + expression, {"answer": str(value), "steps": steps})
