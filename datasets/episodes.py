"""The same words at the start of every episode, for environments that differ by their seed alone."""

from __future__ import annotations

from typing import Literal

from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt
from mmrl.data.records import Records


def prompts(split: Literal["train", "heldout"] = "train", *, text: str, size: int = 1000) -> Records:
    """``size`` times the prompt ``text``. Raises ``UserError`` for an unknown split, and for less than one."""
    if split not in ("train", "heldout"):
        raise UserError(f"split is {split!r}; the data set episodes has 'train' and 'heldout'")
    if size < 1:
        raise UserError(f"size is {size}; it is a number of episodes, 1 or more")
    return Records(size, lambda index: Prompt(f"episodes/{split}/{index}", text))
