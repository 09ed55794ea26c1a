"""Rewards that the runs of alarm_runs.py measure and never train on: a judge and a rule for each modality."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

import mmrl
from mmrl.core.reward_contract import Context, Parts
from mmrl.core.trajectory import Sample
from mmrl.rewards.judge import Judge

EDGE = 2
"""Pixels of a picture's border that ``border`` looks at."""
NEAR = 60.0
_STEP = re.compile(r"(\d+)((?:[-+]\d+)+)=(\d+)")
_WORDS = {
    "colour": {"red", "green", "blue", "yellow", "purple"},
    "shape": {"circle", "square", "triangle", "cross"},
    "count": {"no", "one", "two", "three", "four"},
    "side": {"left", "right", "above", "below", "top", "bottom"},
    "more": {"first", "second"},
}


@mmrl.reward(checks=True)
def border(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """Pictures: the share of the pixels at the edge that have the background's colour; a rule that knows no caption."""
    found = []
    for sample in samples:
        pixels = np.asarray(sample.image, dtype=np.float64)
        near = np.linalg.norm(pixels - list(sample.prompt.meta["background"]), axis=-1) < NEAR
        inner = np.zeros(near.shape, bool)
        inner[EDGE:-EDGE, EDGE:-EDGE] = True
        found.append(float(near[~inner].mean()))
    return found


@mmrl.reward(inputs=("text",), checks=True)
def arithmetic(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """Text: the share of the lines before the answer that are true equations, whatever was asked; 0 without a line."""
    found = []
    for sample in samples:
        lines = [line.strip() for line in (sample.text or "").split("\n") if line.strip()]
        steps = [line for line in lines if not line.startswith("answer:")]
        found.append(float(np.mean([_true(step) for step in steps])) if steps else 0.0)
    return found


@mmrl.reward(inputs=("text",), checks=True)
def form(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """Vision-language models: 1 where the response is one of the words that answer a question of this kind."""
    said = [(sample.text or "").strip().lower() for sample in samples]
    return [float(text in _WORDS[s.prompt.meta["kind"]]) for text, s in zip(said, samples, strict=True)]


@mmrl.reward(inputs=("text",), paths=("model", "rubric"), device=True)
class Critic(Judge):
    """Text: the share of the steps that a generative critic finds right; the options are those of ``judge``."""

    def score(self, samples: Sequence[Sample], *, context: Context) -> Parts:
        """The parts of ``judge`` in mode steps, with ``right`` as the ``score``, in [0, 1]."""
        found = super().score(samples, context=context)
        return {**found, "score": found["right"]}


def _true(step: str) -> bool:
    match = _STEP.fullmatch(step)
    return match is not None and int(match[1]) + sum(map(int, re.findall(r"[-+]\d+", match[2]))) == int(match[3])
