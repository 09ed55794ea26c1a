"""Does the coloured shape of a clip move as its prompt says? A verifier that looks at pixels only.

In every frame it takes the pixels of the prompt's colour (``meta`` has the truth, as the data set ``motions`` writes
it) and follows their centroid. ``looks`` and ``steady`` are further measures: what moves, and whether it moves evenly
and stays what it was. They are for held-out samples, so that a run that learns to move blobs is seen.

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
from mmrl.core.media import open_image
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


@mmrl.reward(inputs=("video",), checks=True)
def steady(samples: Sequence[Sample], *, context: Context | None = None) -> dict[str, list[float]]:
    """Does the shape move evenly, and stay what it was? Parts are in [0, 1].

    - ``identity``: how much its outline in the later frames overlaps that in the first frame (intersection over union,
      places set aside); the mean. The first frame is the prompt's picture, where it has one.
    - ``smooth``: 1 where all steps between frames are equal, less by their deviation over their mean length plus one
      pixel. What stands still is smooth, too.
    - ``score``: their product.

    All are scaled by ``seen``, and are 0 without a shape in the first frame. Raises ``ValueError`` as ``score`` does.
    """
    rows = [_steady(sample) for sample in samples]
    return {part: [row[part] for row in rows] for part in ("score", "identity", "smooth")}


def _steady(sample: Sample) -> dict[str, float]:
    meta, frames = sample.prompt.meta, list(_checked(sample))
    if sample.prompt.media and sample.prompt.media[0].kind == "image":
        frames[0] = open_image(sample.prompt.media[0])
    masks = [outline(frame, meta["palette"][meta["colour"]], meta["background"]) for frame in frames]
    found = [mask for mask in masks if mask is not None]
    first, seen = masks[0], len(found) / len(masks)
    if first is None or len(found) < 2:
        return {"score": 0.0, "identity": 0.0, "smooth": 0.0}
    identity = seen * float(np.mean([_overlap(first, mask) for mask in found[1:]]))
    steps = np.diff([_centre(mask) for mask in found], axis=0)
    uneven = np.linalg.norm(steps - steps.mean(0), axis=1).mean() / (np.linalg.norm(steps, axis=1).mean() + 1)
    smooth = seen * shapes.clipped(1 - float(uneven))
    return {"score": identity * smooth, "identity": identity, "smooth": smooth}


def _overlap(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    """Intersection over union of two masks whose centres are laid on one another."""
    size = max(*a.shape, *b.shape)
    centred = []
    for mask in (a, b):
        canvas = np.zeros((2 * size, 2 * size), bool)
        at = np.argwhere(mask) + np.round(size - _centre(mask)[::-1]).astype(int)
        canvas[at[:, 0], at[:, 1]] = True
        centred.append(canvas)
    return float((centred[0] & centred[1]).sum() / (centred[0] | centred[1]).sum())


def judge(frames: Sequence[Image.Image], meta: Mapping[str, Any], success_weight: float = 0.5) -> dict[str, float]:
    """The parts of ``score`` for one clip of RGB frames."""
    places = [place(frame, meta["palette"][meta["colour"]], meta["background"]) for frame in frames]
    at = np.array([p for p in places if p is not None]).reshape(-1, 2)
    seen = len(at) / len(frames)
    way = np.array(WAYS[meta["direction"]], float)
    gone = at[-1] - at[0] if len(at) > 1 else np.zeros(2)
    along, across = float(gone @ way), float(abs(gone @ way[::-1]))
    direction = seen * shapes.clipped(along / FAR) * shapes.clipped(2 - across / max(along, 1e-6))
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
    mask = outline(frame, rgb, background)
    return None if mask is None else _centre(mask)


def outline(frame: Image.Image, rgb: Sequence[float], background: Sequence[float]) -> NDArray[np.bool_] | None:
    """The pixels ``[H, W]`` of the one shape of colour ``rgb`` in a frame; None where there is none, or more."""
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
    return None if np.bincount(labels[inside]).max() < WHOLE * area else inside


def _centre(mask: NDArray[np.bool_]) -> NDArray[Any]:
    y, x = np.nonzero(mask)
    return np.array([x.mean() + 0.5, y.mean() + 0.5])


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
