"""Captions of one moving coloured shape, ``a red circle moves left``: a small text-to-video world with a known truth.

``prompts(split)`` gives the captions, with what a verifier may know in ``meta``; ``frames`` draws a clip of one. Pairs
of colour and kind are held out, as in ``datasets/clips.py``: every colour, kind and direction is in either split.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.media import Media
from mmrl.core.media.images import png_bytes
from mmrl.core.trajectory import Prompt
from mmrl.data.records import check_split

from .clips import DIRECTIONS, clip, pairs
from .shapes import BACKGROUND, COLOURS


def prompts(split: Literal["train", "heldout", "all"] = "train", pictures: int = 0) -> list[Prompt]:
    """The 60 captions of training, the 20 held out, or all, in a fixed order.

    ``pictures``: how often each is there with the first frame of a clip of its own, for models that go on from a
    picture; 0: once, without one. Raises ``UserError``.
    """
    check_split(split, "the motions have", ("train", "heldout", "all"))
    if pictures < 0:
        raise UserError(f"pictures is {pictures}; give how many first frames a caption has, or 0 for none")
    splits = ("train", "heldout") if split == "all" else (split,)
    plain = [_prompt(*pair, direction) for name in splits for pair in pairs(name) for direction in DIRECTIONS]
    return [_from_picture(prompt, n) for n in range(pictures) for prompt in plain] if pictures else plain


def frames(prompt: Prompt, rng: random.Random, count: int = 5) -> list[Image.Image]:
    """``count`` RGB frames of 32 x 32 pixels of a shape that moves as ``prompt.meta`` says, in full view throughout."""
    meta = prompt.meta
    return clip(meta["colour"], meta["kind"], meta["direction"], rng, count=count)


def _from_picture(prompt: Prompt, n: int) -> Prompt:
    first = frames(prompt, random.Random(f"{prompt.id}|{n}"))[0]
    return replace(prompt, id=f"{prompt.id}-{n}", media=(Media("image", data=png_bytes(first)),))


def _prompt(colour: str, kind: str, direction: str) -> Prompt:
    truth = {
        "colour": colour,
        "kind": kind,
        "direction": direction,
        "palette": {name: list(rgb) for name, rgb in COLOURS.items()},
        "background": list(BACKGROUND),
    }
    return Prompt(id=f"motions/{colour}-{kind}-{direction}", text=f"a {colour} {kind} moves {direction}", meta=truth)
