"""Does the coloured shape of a clip move as its prompt says? A verifier that looks at pixels only.

In every frame it takes the pixels of the prompt's colour (``meta`` has the truth, as the data set ``motions`` writes
it) and follows their centroid. ``looks`` is a second measure, of what moves rather than where to: for held-out samples,
so that a run that learns to move blobs is seen.

Lengths are in pixels of a frame whose shorter side is 32; other sizes are resampled to that first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy  # its parts are loaded when they are first used
from numpy.typing import NDArray
from PIL import Image

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

from . import shapes

PARTS = ("score", "success", "direction", "seen")
WAYS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Along x and y; y grows downwards."""
FAR = 8.0
"""Pixels from the first frame to the last that count as moving; the data set draws 10 to 21."""
BACK = 1.0
"""Pixels that a success may go back from one frame to the next."""
OFF_COLOUR = 60.0
"""RGB distance from the line between background and colour, within which a pixel is a mixture of the two."""
WHOLE = 0.8
"""Least share of the colour's pixels that must hang together."""
STRAY = 0.25
"""Most pixels of other colours, as a share of the shape's."""


@mmrl.reward(inputs=("video",), checks=True)
def score(
    samples: Sequence[Sample], *, context: Context | None = None, success_weight: float = 0.5
) -> dict[str, list[float]]:
    """Judge each clip by ``colour``, ``direction``, ``palette`` and ``background`` in its prompt's ``meta``. Parts are
    in [0, 1].

    - ``seen``: the share of frames with one shape of the colour and little else.
    - ``direction``: how far it came the right way, 1 from ``FAR`` pixels on, less where it strays to the side; scaled
      by ``seen``.
    - ``success``: 1 if it is seen in every frame, comes ``FAR`` pixels the right way, at most half as far to the side,
      and never turns back.
    - ``score``: ``success_weight * success``, the rest ``direction``.

    Raises ``ValueError`` for a sample without such ``meta``, or without a clip of at least two frames.
    """
    if not 0 <= success_weight <= 1:
        raise ValueError(f"success_weight is {success_weight}; it must be in [0, 1]")
    rows = [judge(_checked(sample), sample.prompt.meta, success_weight) for sample in samples]
    return {part: [row[part] for row in rows] for part in PARTS}


@mmrl.reward(inputs=("video",), checks=True)
def looks(samples: Sequence[Sample], *, context: Context | None = None) -> dict[str, list[float]]:
    """What moves: the grades of ``shapes.score`` for one object of the prompt's colour and kind, mean over the frames.
    Raises ``ValueError`` as ``score`` does."""
    rows = []
    for sample in samples:
        meta = sample.prompt.meta
        scene = {**meta, "objects": [{"colour": meta["colour"], "kind": meta["kind"], "count": 1}]}
        rows.append([shapes.judge(frame, scene) for frame in _checked(sample)])
    parts = ("score", "success", "colour", "kind")
    return {part: [float(np.mean([frame[part] for frame in row])) for row in rows] for part in parts}


def judge(frames: Sequence[Image.Image], meta: Mapping[str, Any], success_weight: float = 0.5) -> dict[str, float]:
    """The parts of ``score`` for one clip of RGB frames."""
    places = [place(frame, meta["palette"][meta["colour"]], meta["background"]) for frame in frames]
    at = np.array([p for p in places if p is not None]).reshape(-1, 2)
    seen = len(at) / len(frames)
    way = np.array(WAYS[meta["direction"]], float)
    gone = at[-1] - at[0] if len(at) > 1 else np.zeros(2)
    along, across = float(gone @ way), float(abs(gone @ way[::-1]))
    direction = seen * _clip(along / FAR) * _clip(2 - across / max(along, 1e-6))
    onward = bool((np.diff(at @ way) >= -BACK).all())
    success = float(seen == 1 and along >= FAR and across <= along / 2 and onward)
    return {
        "seen": seen,
        "direction": direction,
        "success": success,
        "score": (1 - success_weight) * direction + success_weight * success,
    }


def place(frame: Image.Image, rgb: Sequence[float], background: Sequence[float]) -> NDArray[Any] | None:
    """The centroid (x, y) of the one shape of colour ``rgb`` in a frame; None where there is none, or more."""
    pixels = shapes.resampled(frame)
    base, line = np.asarray(background, float), np.asarray(rgb, float) - np.asarray(background, float)
    away = pixels - base
    share = np.clip(away @ line / (line @ line), 0, 1)
    mixed = np.linalg.norm(away - share[..., None] * line, axis=-1) < OFF_COLOUR
    inside = mixed & (share >= 0.5)
    area = float(inside.sum())
    labels = np.zeros(inside.shape, np.int32)
    scipy.ndimage.label(inside, structure=np.ones((3, 3)), output=labels)
    if not shapes.AREA[0] <= area <= shapes.AREA[1] or (~mixed).sum() > STRAY * area:
        return None
    if np.bincount(labels[inside]).max() < WHOLE * area:
        return None
    y, x = np.nonzero(inside)
    return np.array([x.mean() + 0.5, y.mean() + 0.5])


def _clip(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _checked(sample: Sample) -> Sequence[Image.Image]:
    missing = [
        key for key in ("colour", "kind", "direction", "palette", "background") if not sample.prompt.meta.get(key)
    ]
    if missing:
        raise ValueError(
            f"the motion reward needs {', '.join(missing)} in the meta of prompt {sample.prompt.id!r}: take the "
            "prompts from the data set 'motions', or choose a reward that does not need a clip's truth"
        )
    if sample.video is None or len(sample.video) < 2:
        raise ValueError(
            f"the motion reward needs a clip of two frames or more, and the sample of {sample.prompt.id!r} has "
            f"{len(sample.video or ())}: use a pipeline that makes clips (diffusion/wan), and more sampling.frames"
        )
    return sample.video
