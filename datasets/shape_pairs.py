"""Drawn pairs of a better and a worse picture for the captions of ``shapes``: for Diffusion-DPO.

The better picture shows what the caption says; the worse one shows another caption of the same sort, with the number,
the colour, the kind or the place wrong. A prompt's ``media`` are the two, in this order, as PNG.
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


def prompts(
    split: Literal["train", "heldout", "all"] = "train",
    *,
    per_caption: int = 4,
    relations: int | None = 0,
    seed: int = 0,
) -> list[Prompt]:
    """``per_caption`` pairs of every caption of ``split`` of ``shapes``; the same ``seed``, the same pairs.

    ``relations``: captions of two objects, as of ``shapes``. Raises ``ValueError`` for an unknown split.
    """
    captions = shapes(split, relations=relations, held_out_relations=relations)
    made = [pair for n in range(per_caption) for pair in (_paired(p, captions, f"{seed}|{n}") for p in captions)]
    random.Random(f"shape_pairs|{seed}").shuffle(made)
    return made


def _paired(prompt: Prompt, captions: list[Prompt], key: str) -> Prompt:
    rng = random.Random(f"shape_pairs|{key}|{prompt.id}")
    others = [p for p in captions if p.meta["task"] == prompt.meta["task"] and p.text != prompt.text]
    near = [p for p in others if sum(a != b for a, b in zip(p.text.split(), prompt.text.split(), strict=False)) <= 2]
    wrong = rng.choice(near or others)
    media = tuple(Media("image", data=png_bytes(draw(scene(shown, rng)))) for shown in (prompt, wrong))
    return replace(prompt, id=f"{prompt.id}-{key}", media=media)
