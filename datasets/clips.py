"""Clips of one moving coloured shape, with questions whose answers are known: a small world of motion.

``prompts(split)``: "Which way does the red circle move?", a real MP4 of eight frames, and ``meta["answer"]``. The
scenes are drawn as in ``datasets/shapes.py``. Pairs of colour and kind are held out, every colour and every kind being
seen in training; all directions are equally frequent in either split, so a guess is right a quarter of the time.
"""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Sequence
from typing import Literal

from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.media import Media
from mmrl.core.media.decoding import needs
from mmrl.core.trajectory import Prompt
from mmrl.data.records import Records, check_split

from .shapes import COLOURS, KINDS, SIZE, Shape, draw

DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Steps along x and y; y grows downwards."""
FRAMES = 8
FPS = 8
_ENCODER = {"crf": "4", "preset": "ultrafast"}


def prompts(
    split: Literal["train", "heldout"] = "train",
    samples: int = 1000,
    seed: int = 0,
    size: int = SIZE,
    questions: Sequence[str] = ("direction",),
) -> Records:
    """``samples`` questions, each about a clip of its own, drawn and encoded when it is asked for.

    ``size``: width and height in pixels, a multiple of 32. ``questions``: any of ``direction``, ``colour``, ``kind``,
    taken in turn. The same arguments give the same bytes, and a longer set begins with the shorter one. Raises
    ``UserError`` for arguments that cannot be and where PyAV, which encodes the clips, is not installed.
    """
    check_split(split, "the clips have")
    if size < SIZE or size % SIZE:
        raise UserError(f"size is {size}; give a multiple of {SIZE}")
    if not questions or not {*questions} <= {*ASK}:
        raise UserError(f"questions are {list(questions)}; choose among {', '.join(ASK)}")
    if samples < 1:
        raise UserError(f"samples is {samples}; give how many clips there are to be")
    needs("av", "the clips are encoded with PyAV")
    scenes = list(itertools.product(pairs(split), DIRECTIONS))
    random.Random(f"clips|{split}|{seed}").shuffle(scenes)

    def get(i: int) -> Prompt:
        (colour, kind), direction = scenes[i % len(scenes)]
        question = questions[i // len(scenes) % len(questions)]
        rng = random.Random(f"clips|{split}|{seed}|{i}")
        truth = {"direction": direction, "colour": colour, "kind": kind}
        return Prompt(
            id=f"clips/{split}-{seed}-{i}",
            text=ASK[question].format(**truth),
            meta={"answer": truth[question], "task": question, **truth},
            media=(Media("video", data=encode(clip(colour, kind, direction, rng, size))),),
        )

    return Records(samples, get)


def clip(
    colour: str, kind: str, direction: str, rng: random.Random, size: int = SIZE, count: int = FRAMES
) -> list[Image.Image]:
    """The ``count`` frames of a shape that moves at an even pace, in full view from the first to the last, RGB."""
    dx, dy = DIRECTIONS[direction]
    radius = rng.uniform(4.5, 6.0)
    low, high = radius + 1, SIZE - radius - 1
    way = rng.uniform(10.0, high - low)
    along, across = rng.uniform(low, high - way), rng.uniform(low, high)
    frames = []
    for i in range(count):
        gone = way * i / (count - 1)
        at = along + gone if dx + dy > 0 else along + way - gone
        x, y = (at, across) if dx else (across, at)
        frame = draw([Shape(colour, kind, x, y, radius)])
        frames.append(frame.resize((size, size), Image.Resampling.NEAREST) if size != SIZE else frame)
    return frames


def encode(frames: Sequence[Image.Image], fps: int = FPS) -> bytes:
    """``frames`` as an MP4 (H.264, full colour resolution: half of it would smear shapes of ten pixels)."""
    import av  # pyright: ignore[reportMissingImports]

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options=_ENCODER)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv444p"
        stream.codec_context.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode(None))
    return file.getvalue()


def pairs(split: str) -> list[tuple[str, str]]:
    """Colours and kinds that occur together in ``split``."""
    colours = list(COLOURS)
    return [
        (colour, kind)
        for (i, colour), (j, kind) in itertools.product(enumerate(colours), enumerate(KINDS))
        if (i % len(KINDS) == j) == (split == "heldout")
    ]


ASK = {
    "direction": "Which way does the {colour} {kind} move?",
    "colour": "What colour is the moving {kind}?",
    "kind": "What shape is moving?",
}
"""The questions, to be filled in with the truth of a clip."""
