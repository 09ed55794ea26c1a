"""Drawn pictures in a style of their own, with the captions of ``shapes``: miniatures, whose objects are smaller.

A folder of somebody's pictures in small: ``count`` of them to learn the style from. A prompt's ``media`` is the
picture, as PNG.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

from mmrl.core.media import Media
from mmrl.core.media.images import png_bytes
from mmrl.core.trajectory import Prompt

from .shapes import draw, scene
from .shapes import prompts as shapes

SCALE = 0.75
"""The size of an object over that in ``shapes``."""


def prompts(
    split: Literal["train", "heldout", "all"] = "train",
    *,
    count: int | None = 30,
    relations: int | None = 0,
    seed: int = 0,
) -> list[Prompt]:
    """A picture of each caption of ``split`` of ``shapes``, or of ``count`` of them; the same ``seed``, the same ones.

    ``relations``: captions of two objects, as of ``shapes``. Raises ``ValueError`` for an unknown split.
    """
    captions = shapes(split, relations=relations, held_out_relations=relations)
    random.Random(f"shape_style|{seed}").shuffle(captions)
    return [_pictured(caption, seed) for caption in captions[:count]]


def _pictured(caption: Prompt, seed: int) -> Prompt:
    objects = scene(caption, random.Random(f"shape_style|{seed}|{caption.text}"))
    small = [replace(one, radius=SCALE * one.radius) for one in objects]
    return replace(caption, id=f"{caption.id}-small", media=(Media("image", data=png_bytes(draw(small))),))
