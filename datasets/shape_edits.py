"""Drawn pictures of ``shapes`` with an instruction to change a colour: for models that edit.

A prompt's one medium is the picture as PNG; its ``meta`` is the truth of the picture that is wanted, so that the
verifier ``shapes`` rewards an edit which changes the colour, and leaves number, kind and place as they are.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

from mmrl.core.media import Media
from mmrl.core.trajectory import Prompt

from .shapes import COLOURS, draw, png, scene
from .shapes import prompts as shapes


def prompts(
    split: Literal["train", "heldout", "all"] = "train", *, per_caption: int = 4, seed: int = 0
) -> list[Prompt]:
    """``per_caption`` edits that end in what a caption of ``split`` of ``shapes`` says, for every caption of shapes of
    one colour; the same ``seed``, the same edits. Raises ``ValueError`` for an unknown split."""
    captions = shapes(split, relations=0, held_out_relations=0)
    made = [_edit(caption, f"{seed}|{n}") for n in range(per_caption) for caption in captions]
    random.Random(f"shape_edits|{seed}").shuffle(made)
    return made


def _edit(caption: Prompt, key: str) -> Prompt:
    rng = random.Random(f"shape_edits|{key}|{caption.id}")
    wanted = caption.meta["objects"][0]["colour"]
    colour = rng.choice([name for name in COLOURS if name != wanted])
    before = draw([replace(shape, colour=colour) for shape in scene(caption, rng)])
    media = (Media("image", data=png(before)),)
    return replace(caption, id=f"{caption.id}-{key}", text=f"change the colour to {wanted}", media=media)
