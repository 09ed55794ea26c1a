"""Drawn pictures of ``shapes`` with an instruction to change a colour, or a place: for models that edit.

A prompt's one medium is the picture as PNG; its ``meta`` is the truth of the picture that is wanted, so that the
verifier ``shapes`` rewards an edit which does what was asked, and leaves number, kind and colour as they are. ``edit``
in ``meta`` says what changes; ``shapes:kept`` measures the outlines that should stay.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

from mmrl.core.media import Media
from mmrl.core.media.images import png_bytes
from mmrl.core.trajectory import Prompt

from .shapes import COLOURS, SIDES, Shape, draw, scene
from .shapes import prompts as shapes

Change = Literal["colour", "place"]


def prompts(
    split: Literal["train", "heldout", "all"] = "train",
    *,
    per_caption: int = 4,
    seed: int = 0,
    changes: tuple[Change, ...] = ("colour",),
) -> list[Prompt]:
    """``per_caption`` edits of each of ``changes`` that end in what a caption of ``split`` of ``shapes`` says, for
    every caption of shapes of one colour; a place changes where the caption has one object and a side. The same
    ``seed``, the same edits. Raises ``ValueError`` for an unknown split or change."""
    if unknown := {*changes} - {"colour", "place"}:
        raise ValueError(f"changes has {min(unknown)!r}; an edit changes the 'colour' or the 'place'")
    captions = [c for c in shapes(split, relations=0, held_out_relations=0) if c.meta["task"] != "relation"]
    made = [
        _edit(caption, change, f"{seed}|{n}")
        for change in changes
        for n in range(per_caption)
        for caption in captions
        if change == "colour" or "side" in caption.meta
    ]
    random.Random(f"shape_edits|{seed}").shuffle(made)
    return made


def pair(caption: Prompt, change: Change, rng: random.Random) -> tuple[str, list[Shape], list[Shape]]:
    """An instruction, what is drawn before it, and after it."""
    if change == "colour":
        wanted = caption.meta["objects"][0]["colour"]
        colour = rng.choice([name for name in COLOURS if name != wanted])
        after = scene(caption, rng)
        return f"change the colour to {wanted}", [replace(shape, colour=colour) for shape in after], after
    after, side = scene(caption, rng), caption.meta["side"]
    other = rng.choice([name for name in SIDES if name != side])
    while True:  # of the same size, in another half
        (before,) = scene(replace(caption, meta={**caption.meta, "side": other}), rng)
        before = replace(before, radius=after[0].radius)
        if _inside(before) and not _at(before, side):
            return f"move it to the {side}", [before], after


def _inside(shape: Shape) -> bool:
    return all(shape.radius + 1 <= value <= 31 - shape.radius for value in (shape.x, shape.y))


def _at(shape: Shape, side: str) -> bool:
    return {"left": shape.x < 16, "right": shape.x > 16, "top": shape.y < 16, "bottom": shape.y > 16}[side]


def _edit(caption: Prompt, change: Change, key: str) -> Prompt:
    name = key if change == "colour" else f"{change}|{key}"
    text, before, _ = pair(caption, change, random.Random(f"shape_edits|{name}|{caption.id}"))
    media = (Media("image", data=png_bytes(draw(before))),)
    return replace(caption, id=f"{caption.id}-{name}", text=text, media=media, meta={**caption.meta, "edit": change})
