"""The same words at the start of every episode, for environments that differ by their seed alone."""

from __future__ import annotations

from typing import Literal

from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt
from mmrl.data.records import Records, check_split


def prompts(split: Literal["train", "heldout"] = "train", *, text: str, size: int = 1000) -> Records:
    """``size`` times the prompt ``text``. Raises ``UserError`` for an unknown split, and for less than one."""
    check_split(split, "the data set episodes has")
    if size < 1:
        raise UserError(f"size is {size}; it is a number of episodes, 1 or more")
    return Records(size, lambda index: Prompt(f"episodes/{split}/{index}", text))
