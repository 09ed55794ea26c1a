"""Short words to be written in a picture: a small text-to-image task whose truth an OCR model reads.

A caption is ``a sign that says "CAT"``; the word is a consonant, a vowel and a consonant in capitals, 2,205 in all.
``prompts(split)`` gives captions with the word in ``meta["text"]``, ``picture`` draws one. A fixed fifth of the words
is held out: never sampled in RL.
"""

from __future__ import annotations

import itertools
import random
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt
from mmrl.data.records import check_split, is_held_out, number_of

VOWELS = "AEIOU"
CONSONANTS = "BCDFGHJKLMNPQRSTVWXYZ"
WIDTH, HEIGHT = 48, 24
FONT_SIZES = (13, 14, 15)


def prompts(split: Literal["train", "heldout", "all"] = "train", *, count: int | None = None) -> list[Prompt]:
    """The captions of ``split``, in an order that mixes the alphabet and is always the same.

    ``count`` takes the first of them. Raises ``UserError`` for an unknown split, or more words than there are.
    """
    check_split(split, "the data set words has", ("train", "heldout", "all"))
    every = sorted(map("".join, itertools.product(CONSONANTS, VOWELS, CONSONANTS)), key=number_of)
    kept = [word for word in every if split == "all" or is_held_out(word) == (split == "heldout")]
    if count is not None and not 1 <= count <= len(kept):
        raise UserError(f"count is {count}; set it to 1 to {len(kept):,}, or remove it to have all words of {split!r}")
    return [prompt(word) for word in kept[:count]]


def prompt(word: str) -> Prompt:
    """The caption that asks for ``word``."""
    return Prompt(id=f"words/{word}", text=f'a sign that says "{word}"', meta={"text": word})


def picture(prompt: Prompt, seed: int) -> Image.Image:
    """The word of ``prompt`` in dark ink on a pale ground, ``WIDTH`` x ``HEIGHT`` pixels; one seed, one picture."""
    word = str(prompt.meta["text"])
    rng = random.Random(f"{word}|{seed}")
    ground = tuple(rng.randint(185, 255) for _ in range(3))
    ink = tuple(rng.randint(0, 80) for _ in range(3))
    image = Image.new("RGB", (WIDTH, HEIGHT), ground)
    where = (WIDTH / 2 + rng.uniform(-2, 2), HEIGHT / 2 + rng.uniform(-1.5, 1.5))
    font = ImageFont.load_default(rng.choice(FONT_SIZES))  # the one that Pillow has in itself
    ImageDraw.Draw(image).text(where, word, fill=ink, font=font, anchor="mm")
    return image
