"""Questions about drawn scenes of coloured shapes, with answers of one or two words: a small visual question answering.

Seven kinds of question, on pictures of several sizes:

- colour:   ``What colour is the circle?``                                  red
- shape:    ``What shape is the red one?``                                  circle
- count:    ``How many circles are there?``                                 two
- side:     ``Where is the circle?``                                        left
- relation: ``Where is the red circle, seen from the blue square?``         above
- thing:    ``What is left of the blue square?``                            red circle
- more:     ``Which picture has more circles?`` (two pictures)              first

Questions are made when they are asked for: ``prompts(split)`` is a lazy sequence of any length, with the same question
at the same index each time. What objects a scene holds and what the answer is make a composition; a fixed fifth of the
compositions of each kind is held out.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.media import Media
from mmrl.core.media.images import png_bytes
from mmrl.core.trajectory import Prompt
from mmrl.data.records import Records, check_split, is_held_out, number_of

from . import shapes

QUESTIONS = ("colour", "shape", "count", "side", "relation", "thing", "more")
SIZES = ((32, 32), (32, 32), (40, 32), (32, 40), (40, 40))
"""Width and height in pixels, drawn with equal chances."""
NUMBERS = ("no", "one", "two", "three", "four")
_LONG = {"left": (40, 32), "right": (40, 32), "above": (32, 40), "below": (32, 40)}
"""Sizes with room for three objects in a row."""
_TOWARDS = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}
_RADII = ((5.0, 7.0), (4.2, 5.6))
"""Half the width of an object that stands alone, and of one of several."""
_APART = 2.0
_OFF_MIDDLE = 3.0
_ALONG = 9.0
"""Pixels by which one object is left of another; across, they may be off by half of their distance."""

Thing = tuple[str, str]
"""Colour and kind of an object."""


@dataclass(frozen=True)
class Composition:
    """What is asked of what: the ``things`` of each picture, and the ``answer``."""

    question: str
    text: str
    pictures: tuple[tuple[Thing, ...], ...]
    answer: str

    @property
    def key(self) -> str:
        held = "; ".join(", ".join(" ".join(thing) for thing in picture) for picture in self.pictures)
        return f"{self.text} {held}: {self.answer}"


def prompts(
    split: Literal["train", "heldout"] = "train",
    *,
    questions: Sequence[str] = QUESTIONS,
    size: int | None = None,
    seed: int = 0,
) -> Records:
    """``size`` questions (7,000 to train on, 1,400 held out) of the kinds ``questions``, in turn.

    ``seed`` draws other pictures of the same compositions. A prompt's ``meta`` has ``answer``, ``kind`` (of question)
    and ``objects``: for each picture, ``[colour, kind, x, y]`` of each object, with ``x`` and ``y`` of its centre in
    [0, 1]. Raises ``UserError`` for an unknown split or kind of question.
    """
    check_split(split, "the scenes data set has")
    if not questions or isinstance(questions, str) or not {*questions} <= {*QUESTIONS}:
        raise UserError(f"questions is {questions!r}; give a list of some of {', '.join(QUESTIONS)}")
    size = size if size is not None else 7000 if split == "train" else 1400
    if size < 1:
        raise UserError(f"size is {size}; it is a number of questions, 1 or more")
    kinds = [_of_split(q, split == "heldout") for q in questions]

    def get(index: int) -> Prompt:
        row, of = divmod(index, len(kinds))
        return ask(kinds[of][row % len(kinds[of])], f"scenes/{split}/{seed}/{index}")

    return Records(size, get)


def ask(composition: Composition, name: str) -> Prompt:
    """The question about one drawing of its scene; ``name`` names the prompt and seeds the drawing."""
    rng = random.Random(name)
    drawn = [_place(composition, i, rng) for i in range(len(composition.pictures))]
    objects = [[[s.colour, s.kind, round(s.x / w, 3), round(s.y / h, 3)] for s in scene] for scene, (w, h) in drawn]
    return Prompt(
        id=name,
        text="<image>" * len(drawn) + composition.text,
        meta={"answer": composition.answer, "kind": composition.question, "objects": objects},
        media=tuple(Media("image", data=png_bytes(render(scene, size), compress_level=1)) for scene, size in drawn),
    )


def render(scene: Sequence[shapes.Shape], size: tuple[int, int]) -> Image.Image:
    """An RGB picture of ``size`` (width, height), put together of tiles that ``shapes.draw`` draws."""
    image = Image.new("RGB", size, shapes.BACKGROUND)
    corners = [sorted({*range(0, length - shapes.SIZE, shapes.SIZE), length - shapes.SIZE}) for length in size]
    for x, y in itertools.product(*corners):
        moved = [shapes.Shape(s.colour, s.kind, s.x - x, s.y - y, s.radius) for s in scene]
        image.paste(shapes.draw(moved), (x, y))
    return image


@functools.cache
def compositions(question: str) -> tuple[Composition, ...]:
    """Every composition of one kind of question, in an order that mixes them."""
    return tuple(sorted(_MAKERS[question](), key=lambda c: number_of(c.key)))


@functools.cache
def _of_split(question: str, held_out: bool) -> tuple[Composition, ...]:
    return tuple(c for c in compositions(question) if is_held_out(c.key) == held_out)


def _plural(kind: str) -> str:
    return f"{kind}es" if kind == "cross" else f"{kind}s"


_THINGS: list[Thing] = list(itertools.product(shapes.COLOURS, shapes.KINDS))


def _colour() -> list[Composition]:
    return [Composition("colour", f"What colour is the {of[0][1]}?", (of,), of[0][0]) for of in _one_or_two(1)]


def _shape() -> list[Composition]:
    return [Composition("shape", f"What shape is the {of[0][0]} one?", (of,), of[0][1]) for of in _one_or_two(0)]


def _one_or_two(differ: int) -> list[tuple[Thing, ...]]:
    """Things alone, and two of them that ``differ`` in colour (0) or kind (1)."""
    pairs = [(a, b) for a, b in itertools.permutations(_THINGS, 2) if a[differ] != b[differ]]
    return [*((thing,) for thing in _THINGS), *pairs]


def _count() -> list[Composition]:
    """One to three objects of a kind, in one colour or two, beside none, one or two of other kinds; at most four."""
    rng = random.Random("count")
    found = []
    for a, number in itertools.product(_THINGS, (1, 2, 3)):
        others = [b for b in _THINGS if b[1] != a[1]]
        pairs = rng.sample(list(itertools.combinations(others, 2)), 64 if number == 1 else 0)
        for last in [a] if number == 1 else [(colour, a[1]) for colour in shapes.COLOURS]:
            for beside in [(), *((b,) for b in others), *pairs]:
                held = (*[a] * (number - 1), last, *beside)
                found.append(Composition("count", f"How many {_plural(a[1])} are there?", (held,), NUMBERS[number]))
    return found


def _side() -> list[Composition]:
    return [
        Composition("side", f"Where is the {a[1]}?", ((a,),), side)
        for a, side in itertools.product(_THINGS, ("left", "right", "top", "bottom"))
    ]


def _relation() -> list[Composition]:
    return [
        Composition("relation", f"Where is the {' '.join(a)}, seen from the {' '.join(b)}?", ((a, b),), towards)
        for (a, b), towards in itertools.product(itertools.permutations(_THINGS, 2), _TOWARDS)
    ]


def _thing() -> list[Composition]:
    """Three objects in a row: the one asked for, the one in the middle that is named, and one on the other side."""
    rng = random.Random("thing")
    found = []
    for towards, a in itertools.product(_TOWARDS, _THINGS):
        said = f"{towards} of" if towards in ("left", "right") else towards
        for _ in range(25):
            middle, other = rng.sample([b for b in _THINGS if b != a], 2)
            text = f"What is {said} the {' '.join(middle)}?"
            found.append(Composition("thing", text, ((a, middle, other),), " ".join(a)))
    return list({c.key: c for c in found}.values())


def _more() -> list[Composition]:
    """Two pictures with none to three objects of a kind each, and never equally many."""
    found = []
    for a, (first, second) in itertools.product(_THINGS, itertools.permutations(range(4), 2)):
        for b in _THINGS:
            if b[1] != a[1]:
                held = tuple((a,) * n if n else (b,) for n in (first, second))
                answer = "first" if first > second else "second"
                found.append(Composition("more", f"Which picture has more {_plural(a[1])}?", held, answer))
    return list({c.key: c for c in found}.values())


_MAKERS: dict[str, Callable[[], list[Composition]]] = {
    "colour": _colour,
    "shape": _shape,
    "count": _count,
    "side": _side,
    "relation": _relation,
    "thing": _thing,
    "more": _more,
}


def _place(composition: Composition, picture: int, rng: random.Random) -> tuple[list[shapes.Shape], tuple[int, int]]:
    """Positions and sizes of a picture's things, drawn at random until they are apart and make the answer right."""
    things = composition.pictures[picture]
    towards = _asked(composition)
    width, height = size = rng.choice((_LONG[towards], (40, 40)) if towards and len(things) > 2 else SIZES)
    low, high = _RADII[len(things) > 1]
    while True:
        scene: list[shapes.Shape] = []
        for colour, kind in things:
            r = rng.uniform(low, high)
            s = shapes.Shape(colour, kind, rng.uniform(r + 1, width - r - 1), rng.uniform(r + 1, height - r - 1), r)
            if any(max(abs(o.x - s.x), abs(o.y - s.y)) < o.radius + r + _APART for o in scene):
                break
            if towards and scene and not _stands(scene[-1], s, towards):
                break
            scene.append(s)
        if len(scene) == len(things) and (composition.question != "side" or _is_at(scene[0], size, composition.answer)):
            rng.shuffle(scene)
            return scene, size


def _asked(composition: Composition) -> str | None:
    """Where each thing stands, seen from the next one of the composition."""
    if composition.question == "relation":
        return composition.answer
    if composition.question == "thing":
        return next(t for t in _TOWARDS if f" {t} " in composition.text)
    return None


def _is_at(s: shapes.Shape, size: tuple[int, int], side: str) -> bool:
    """Whether ``s`` is plainly on that side of the middle of a picture of ``size``, and on no other as much."""
    dx, dy = s.x - size[0] / 2, s.y - size[1] / 2
    along, across = {"left": (-dx, dy), "right": (dx, dy), "top": (-dy, dx), "bottom": (dy, dx)}[side]
    return along >= _OFF_MIDDLE and along >= 2 * abs(across)


def _stands(a: shapes.Shape, b: shapes.Shape, towards: str) -> bool:
    """Whether ``a`` is plainly on that side of ``b``."""
    dx, dy = a.x - b.x, a.y - b.y
    ux, uy = _TOWARDS[towards]
    along, across = dx * ux + dy * uy, dx * uy + dy * ux
    return along >= _ALONG and abs(across) <= along / 2
