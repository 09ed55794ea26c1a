"""Scenes that are shown too coarse to answer: one shape in a picture of 64 x 64 pixels, of which a prompt has 8 x 8.

    What shape is the red one?        circle

Where the shape is can be seen, and what it is cannot. ``fine`` draws the whole picture, for the environment ``zoom``. A
fixed fifth of the compositions (colour, kind and corner) is held out.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, Literal

from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.media import Media
from mmrl.core.media.images import png_bytes
from mmrl.core.trajectory import Prompt
from mmrl.data.records import Records, check_split, is_held_out

from . import scenes, shapes

SIDE, SHOWN = 64, 8
"""Pixels of the width of a picture, and of what a prompt has of it."""
ROWS, COLUMNS = ("top", "bottom"), ("left", "right")


def prompts(split: Literal["train", "heldout"] = "train", *, size: int | None = None, seed: int = 0) -> Records:
    """``size`` questions (7,000 to train on, 1,400 held out). A prompt's ``meta`` has ``answer``, ``corner`` and
    ``shape``: ``[colour, kind, x, y, radius]`` in pixels. Raises ``UserError`` for an unknown split."""
    check_split(split, "the coarse data set has")
    size = size if size is not None else 7000 if split == "train" else 1400
    if size < 1:
        raise UserError(f"size is {size}; it is a number of questions, 1 or more")
    every = itertools.product(shapes.COLOURS, shapes.KINDS, range(2), range(2))
    kept = [one for one in every if is_held_out(repr(one)) == (split == "heldout")]
    return Records(size, lambda index: _ask(*kept[index % len(kept)], f"coarse/{split}/{seed}/{index}"))


def fine(prompt: Prompt) -> Image.Image:
    """The whole picture of a prompt of this data set, RGB."""
    shape: list[Any] = prompt.meta["shape"]
    return scenes.render([shapes.Shape(*shape)], (SIDE, SIDE))


def _ask(colour: str, kind: str, row: int, column: int, name: str) -> Prompt:
    rng = random.Random(name)
    radius = round(rng.uniform(5.0, 7.0), 2)
    x, y = (round(SIDE / 2 * at + rng.uniform(radius + 1, SIDE / 2 - radius - 1), 2) for at in (column, row))
    corner = f"{ROWS[row]} {COLUMNS[column]}"
    meta = {"answer": kind, "corner": corner, "shape": [colour, kind, x, y, radius]}
    prompt = Prompt(name, f"<image>What shape is the {colour} one?", meta)
    shown = fine(prompt).resize((SHOWN, SHOWN), Image.Resampling.BOX)
    return Prompt(name, prompt.text, meta, media=(Media("image", data=png_bytes(shown, compress_level=1)),))
