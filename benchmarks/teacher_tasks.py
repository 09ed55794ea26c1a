"""The prompts and rewards of ``proof_teacher.py``: three sorts of sums, told apart by their first number, and three of
pictures, told apart by what is drawn; for each sort a reward of its own, known by the prompt's ``data_source``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import mmrl
from mmrl.core.trajectory import Prompt, Sample

FIRST = {"brief": range(10, 40), "right": range(40, 70), "stepwise": range(70, 100)}
"""The numbers that chains of a sort begin with."""
DRAWN = {"bright": ("circle",), "leftward": ("square",), "rightward": ("triangle", "cross")}
"""What the pictures of a sort show."""


def prompts(split: str = "train", *, kind: str, count: int = 2000) -> list[Prompt]:
    """Chains of three operations of one sort, at most ``count``."""
    every = mmrl.load("datasets", "sums").prompts(split, count=5 * count)
    chosen = [p for p in every if int(re.findall(r"\d+", p.text)[0]) in FIRST[kind]]
    return chosen[:count]


def captions(split: str = "train", *, kind: str) -> list[Prompt]:
    """The captions of one sort of picture, without those of two objects."""
    every = mmrl.load("datasets", "shapes").prompts(split, relations=0, held_out_relations=0)
    return [p for p in every if p.meta["objects"][0]["kind"] in DRAWN[kind]]


# -- texts -------------------------------------------------------------------------------------------------------------


def right(prompt: Prompt, text: str) -> bool:
    """The answer is right."""
    found = re.search(r"answer: *(-?\d+)", text)
    return found is not None and found[1] == prompt.meta["answer"]


def brief(prompt: Prompt, text: str) -> bool:
    """It says an answer, right or wrong, behind one step at most."""
    return "answer:" in text and len(_parts(text)) <= 2


def stepwise(prompt: Prompt, text: str) -> bool:
    """Every step is right and does one operation."""
    one_each = len(_parts(text)) == len(prompt.meta["steps"]) + 1
    return one_each and not mmrl.load("datasets", "sums").wrong_steps(prompt, text)


def _parts(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


WRITTEN: Mapping[str, Callable[[Prompt, str], bool]] = {"brief": brief, "right": right, "stepwise": stepwise}


@mmrl.reward(inputs=("text",))
def own(samples: Sequence[Sample], *, context: object, only: str | None = None) -> list[float]:
    """1 for what the source of the prompt asks for; 0 for every prompt of another source than ``only``."""
    sorts = [s.prompt.meta["data_source"] for s in samples]
    return [
        float(only in (None, sort) and WRITTEN[sort](s.prompt, s.text or ""))
        for s, sort in zip(samples, sorts, strict=True)
    ]


# -- pictures ----------------------------------------------------------------------------------------------------------


@mmrl.reward(inputs=("image",))
def shown(samples: Sequence[Sample], *, context: object, only: str | None = None) -> list[float]:
    """Circles: how bright a picture is; squares: how much brighter its left half is than its right one; triangles and
    crosses: the opposite; whatever the caption says. 0 for every prompt of another source than ``only``."""
    sorts = [s.prompt.meta["data_source"] for s in samples]
    return [_of_picture(sort, s) if only in (None, sort) else 0.0 for s, sort in zip(samples, sorts, strict=True)]


def _of_picture(sort: str, sample: Sample) -> float:
    pixels = np.asarray(sample.image, dtype=np.float64) / 255
    left, right = (half.mean() for half in np.array_split(pixels, 2, axis=1))
    return float({"bright": (left + right) / 2, "leftward": left - right, "rightward": right - left}[sort])
