"""Drawn scenes of coloured shapes with captions: a small text-to-image task with a checkable truth.

Three sorts of caption, after GenEval's tasks (Ghosh et al. 2023, arXiv 2310.11513):

- count:    ``two red circles``                         colour, kind and number
- side:     ``a red circle at the left``                one object in a half of the picture
- relation: ``a red circle left of a blue square``      two objects, attributes bound to each, and where they stand

``prompts(split)`` gives the captions with the scene's truth in ``meta`` (what a verifier may know), ``scene`` draws one
picture of a caption. A fixed fifth of the compositions is held out: never sampled in RL.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image, ImageDraw

from mmrl.core.json_types import Json
from mmrl.core.trajectory import Prompt
from mmrl.data.records import is_held_out, number_of

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 45, 45),
    "green": (40, 175, 70),
    "blue": (60, 95, 235),
    "yellow": (240, 205, 40),
    "purple": (175, 60, 200),
}
KINDS = ("circle", "square", "triangle", "cross")
NUMBERS = {1: "one", 2: "two", 3: "three"}
SIDES = ("left", "right", "top", "bottom")
RELATIONS = ("left of", "right of", "above", "below")
BACKGROUND = (24, 24, 32)
SIZE = 32
_SUPERSAMPLE = 4
_GAP = 2.0
"""Pixels kept free between two objects, so that a drawn picture is never ambiguous."""


@dataclass(frozen=True)
class Shape:
    """One object: centre ``(x, y)`` and ``radius`` (half its width) in pixels of a ``SIZE`` x ``SIZE`` picture."""

    colour: str
    kind: str
    x: float
    y: float
    radius: float


def prompts(
    split: Literal["train", "heldout", "all"] = "train", relations: int | None = 80, held_out_relations: int | None = 36
) -> list[Prompt]:
    """The captions of ``split``, in a fixed order.

    ``relations`` and ``held_out_relations`` bound the number of two-object compositions, which would outnumber the
    others 10 to 1; None takes all. Raises ``ValueError`` for an unknown split.
    """
    if split not in ("train", "heldout", "all"):
        raise ValueError(f"split is {split!r}; the shapes data set has 'train', 'heldout' and 'all'")
    every = list(_compositions())
    if split == "all":
        return every
    held_out = split == "heldout"
    kept = [p for p in every if is_held_out(p.text) == held_out]
    limit = held_out_relations if held_out else relations
    pairs = sorted((p for p in kept if p.meta["task"] == "relation"), key=lambda p: number_of(p.text))
    allowed = {p.text for p in pairs[:limit]}
    return [p for p in kept if p.meta["task"] != "relation" or p.text in allowed]


def scene(prompt: Prompt, rng: random.Random) -> list[Shape]:
    """Draw positions and sizes at random until the objects fit the caption and do not touch."""
    meta = prompt.meta
    wanted = [(o["colour"], o["kind"]) for o in meta["objects"] for _ in range(o["count"])]
    low, high = (4.2, 5.6) if len(wanted) > 1 else (5.0, 7.0)
    while True:
        shapes = [
            Shape(colour, kind, rng.uniform(r + 1, SIZE - r - 1), rng.uniform(r + 1, SIZE - r - 1), r)
            for (colour, kind), r in ((w, rng.uniform(low, high)) for w in wanted)
        ]
        if _apart(shapes) and _stands_as_said(meta, shapes):
            return shapes


def draw(shapes: list[Shape]) -> Image.Image:
    """Render the objects with smooth edges as an RGB picture of ``SIZE`` x ``SIZE`` pixels."""
    k = _SUPERSAMPLE
    image = Image.new("RGB", (SIZE * k, SIZE * k), BACKGROUND)
    pen = ImageDraw.Draw(image)
    for s in shapes:
        x, y, r = s.x * k, s.y * k, s.radius * k
        colour = COLOURS[s.colour]
        if s.kind == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        elif s.kind == "square":
            pen.rectangle((x - r * 0.9, y - r * 0.9, x + r * 0.9, y + r * 0.9), fill=colour)
        elif s.kind == "triangle":
            pen.polygon([(x, y - r), (x + r, y + r * 0.8), (x - r, y + r * 0.8)], fill=colour)
        elif s.kind == "cross":
            arm = r * 0.36
            pen.rectangle((x - arm, y - r, x + arm, y + r), fill=colour)
            pen.rectangle((x - r, y - arm, x + r, y + arm), fill=colour)
        else:
            raise ValueError(f"{s.kind!r} is no shape; the kinds are {', '.join(KINDS)}")
    return image.resize((SIZE, SIZE), Image.Resampling.BOX)


def picture(prompt: Prompt, seed: int) -> Image.Image:
    """A drawn picture of ``prompt``; the same seed draws the same picture."""
    return draw(scene(prompt, random.Random(f"{prompt.text}|{seed}")))


def _compositions() -> Iterator[Prompt]:
    for number, colour, kind in itertools.product(NUMBERS, COLOURS, KINDS):
        plural = "s" if number > 1 and kind != "cross" else "es" if number > 1 else ""
        yield _prompt("count", f"{NUMBERS[number]} {colour} {kind}{plural}", [(colour, kind, number)])
    for colour, kind, side in itertools.product(COLOURS, KINDS, SIDES):
        yield _prompt("side", f"a {colour} {kind} at the {side}", [(colour, kind, 1)], side=side)
    things = list(itertools.product(COLOURS, KINDS))
    for a, relation, b in itertools.product(things, RELATIONS, things):
        if a != b:
            text = f"a {a[0]} {a[1]} {relation} a {b[0]} {b[1]}"
            yield _prompt("relation", text, [(*a, 1), (*b, 1)], relation=relation)


def _prompt(task: str, text: str, objects: list[tuple[str, str, int]], **position: str) -> Prompt:
    truth: dict[str, Json] = {
        "task": task,
        "objects": [{"colour": c, "kind": k, "count": n} for c, k, n in objects],
        "palette": {name: list(rgb) for name, rgb in COLOURS.items()},
        "background": list(BACKGROUND),
        **position,
    }
    return Prompt(id=f"shapes/{text.replace(' ', '-')}", text=text, meta=truth)


def _apart(shapes: list[Shape]) -> bool:
    return all(
        max(abs(a.x - b.x), abs(a.y - b.y)) >= a.radius + b.radius + _GAP for a, b in itertools.combinations(shapes, 2)
    )


def _stands_as_said(meta: Mapping[str, Any], shapes: list[Shape]) -> bool:
    if "side" in meta:
        (s,) = shapes
        middle, margin = SIZE / 2, 3.0
        return {
            "left": s.x <= middle - margin,
            "right": s.x >= middle + margin,
            "top": s.y <= middle - margin,
            "bottom": s.y >= middle + margin,
        }[meta["side"]]
    if "relation" in meta:
        a, b = shapes
        dx, dy = b.x - a.x, b.y - a.y
        along = {"left of": dx, "right of": -dx, "above": dy, "below": -dy}[meta["relation"]]
        across = abs(dy) if meta["relation"] in ("left of", "right of") else abs(dx)
        return along >= 8 and across <= along / 2
    return True
