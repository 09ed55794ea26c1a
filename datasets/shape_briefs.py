"""Scenes of coloured shapes, asked for in words that the small model that draws them (``shapes-sd3``) never read.

    two crimson discs

is the caption ``two red circles`` of the data set ``shapes``: each of its colours and kinds has another word.
``meta`` has the scene's truth, which the reward ``shapes`` checks. ``meta["guess"]`` is a caption with the brief's
number and place, whose colour and kind are right in a share ``known`` of the briefs, and drawn at random in the others:
what somebody writes who knows the words of the drawer, and is unsure of those of the brief. Compositions that
``shapes`` holds out are held out here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Literal

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt

WORDS: Mapping[str, str] = {
    "red": "crimson",
    "green": "emerald",
    "blue": "azure",
    "yellow": "golden",
    "purple": "violet",
    "circle": "disc",
    "square": "box",
    "triangle": "wedge",
    "cross": "plus",
}
"""What a brief says in place of each word."""
_PLURAL = {"box": "boxes", "plus": "pluses"}


def prompts(
    split: Literal["train", "heldout", "all"] = "train", *, count: int = 1000, seed: int = 0, known: float = 0.0
) -> Sequence[Prompt]:
    """``count`` briefs of the split, each of a random composition of one sort of object; ``seed`` chooses which. Raises
    ``UserError`` for a count below 1, and a share that is none."""
    if count < 1:
        raise UserError(f"count is {count}; it is 1 or more")
    if not 0 <= known <= 1:
        raise UserError(f"known is {known}; it is a share, 0 to 1")
    shapes = mmrl.load("datasets", "shapes")
    captions = shapes.prompts(split, relations=0, held_out_relations=0)
    rng = random.Random(f"{split}/{seed}")
    return [_brief(n, rng.choice(captions), shapes, rng, known) for n in range(count)]


def _brief(n: int, caption: Prompt, shapes: ModuleType, rng: random.Random, known: float) -> Prompt:
    thing = caption.meta["objects"][0]
    drawn = {"colour": list(shapes.COLOURS), "kind": list(shapes.KINDS)}
    guess = {thing[key]: thing[key] if rng.random() < known else rng.choice(words) for key, words in drawn.items()}
    text = _put(caption.text, WORDS)
    meta = {**caption.meta, "guess": _put(caption.text, guess), "caption": caption.text}
    return Prompt(f"shape_briefs/{n}/{text.replace(' ', '-')}", text, meta)


def _put(caption: str, words: Mapping[str, str]) -> str:
    """``caption`` with other ``words``, which keep their plural."""

    def other(found: re.Match[str]) -> str:
        word = words.get(found[1], found[1])
        many = word + ("es" if word == "cross" else "s")
        return _PLURAL.get(word, many) if found[2] else word

    return re.sub(rf"\b({'|'.join(words)})(e?s)?\b", other, caption)
