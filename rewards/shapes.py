"""Does the picture show the coloured shapes of its prompt? A verifier that looks at pixels only.

A small GenEval (Ghosh et al. 2023, arXiv 2310.11513): objects are found in the picture, each gets a colour and a kind,
and they are compared with the truth in the prompt's ``meta`` (see ``score``). There is no learned detector:

1. *Find*: pixels that differ from the background, in connected components. A component too small or too large to be an
   object is stray; more than ``STRAY`` pixels of stray spoil the picture.
2. *Colour*: the nearest colour of the palette, if the component's interior is near to it and uniform.
3. *Kind*: soft overlap (intersection over union of coverage, so that smooth edges count by how much of a pixel they
   fill) with each kind's template at the component's own centre and area. A kind needs its ``OVERLAP``, and a lead of
   ``LEAD`` over the next kind: a blob, a diamond or an ellipse is none of them.
4. *Match* wanted and found objects, and compare number, colour, kind and position.

Lengths below are in pixels of a picture whose shorter side is 32; other sizes are resampled to that first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # its parts are loaded when they are first used
from numpy.typing import NDArray
from PIL import Image

import mmrl
from mmrl.core.media import open_image
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample

Array = NDArray[np.float32]

PARTS = ("score", "success", "count", "colour", "kind", "position")
SIZE = 32
SMALLEST_SIDE = 24
AREA = (16.0, 250.0)
"""Area of an object. The data set draws 41 to 160; a policy may be off, but a speck or a flood is no object."""
STRAY = 4.0
OVERLAP = {"circle": 0.91, "square": 0.905, "triangle": 0.88, "cross": 0.85}
"""One or two hundredths below the least of drawn shapes blurred, made noisy and shifted in colour. Long outlines on few
pixels overlap less; a circle must be told from a diamond (0.85), a 5:4 ellipse (0.87), a thick ring (0.88) and a
pentagon (0.90). An octagon (0.96) is a circle here."""
LEAD = 0.06
"""Drawn shapes, treated likewise, lead by 0.075 or more; a square with corners rounded by half by 0.05."""
COLOUR_DISTANCE = 60.0
"""RGB distance within which a colour has its name: half the distance of the two nearest colours of the palette."""
PIXEL_DISTANCE = 90.0
PURITY = 0.85
UNEVENNESS = 45.0
"""Largest RMS distance of an interior pixel from the interior's own colour: rules out texture, gradients and cores."""
SIDE_MARGIN = 1.0
APART = 4.0

_RADII = np.arange(2.5, 9.5, 0.25)
_STEP = 0.25
_WINDOW = 22
_JITTER = 1
_UNIT_AREA = {"circle": np.pi, "square": 3.24, "triangle": 1.8, "cross": 2.3616}
_SOFTNESS = (0.0, 0.5)
"""Gaussian blur (standard deviation) of the templates: pictures are sharp when drawn, soft after a VAE."""


@dataclass(frozen=True)
class Found:
    """One object seen: centroid ``x, y``, median interior ``rgb``, per colour the share of interior pixels near it, the
    RMS ``unevenness`` of the interior, and the overlap with each kind's template."""

    x: float
    y: float
    area: float
    rgb: Array
    shares: dict[str, float]
    unevenness: float
    overlaps: dict[str, float]


@mmrl.reward(checks=True)
def score(
    samples: Sequence[Sample], *, context: Context | None = None, success_weight: float = 0.5
) -> dict[str, list[float]]:
    """Judge each sample's picture by the truth in its prompt's ``meta``. All parts are in [0, 1].

    ``meta`` has ``objects`` (``[{"colour", "kind", "count"}]``), ``palette`` (``{name: [r, g, b]}``), ``background``
    (``[r, g, b]``) and, where the prompt says so, ``side`` or ``relation`` (between the first and the second object).

    - ``success``: 1 if exactly the wanted objects are there, in colour, kind, number and position, and nothing else.
    - ``count``: nearness of the number of objects, lowered by stray marks.
    - ``colour``, ``kind``: mean over matched objects, missing and superfluous ones counting 0.
    - ``position``: nearness to where the objects should be, scaled by how well the matched objects are the wanted
      ones, so that a misplaced attribute earns no place; 1 where the prompt asks for none.
    - ``score``: ``success_weight * success``, the rest the mean of the graded parts that apply: 1 only for a success,
      else below ``1 - success_weight``. Strict success alone is too rare a signal for RL on a weak model.

    Raises ``ValueError`` for a sample without such ``meta``, or without an RGB image of at least 24 pixels a side.
    """
    if not 0 <= success_weight <= 1:
        raise ValueError(f"success_weight is {success_weight}; it must be in [0, 1]")
    rows = [judge(_checked_image(s), _checked_meta(s.prompt), success_weight) for s in samples]
    return {part: [row[part] for row in rows] for part in PARTS}


@mmrl.reward(inputs=("image",), checks=True)
def kept(samples: Sequence[Sample], *, context: Context | None = None) -> list[float]:
    """How much of the shapes in a prompt's picture an edit left as it was, in [0, 1]: the overlap (intersection over
    union of coverage) of what differs from the background before and after. Where ``meta`` says that the edit changes a
    ``place``: the smaller area over the larger. Colours and kinds do not count: that is for ``score``.

    Raises ``ValueError`` as ``score`` does, and for a prompt without a picture.
    """
    return [_kept(sample) for sample in samples]


def _kept(sample: Sample) -> float:
    meta, image = _checked_meta(sample.prompt), _checked_image(sample)
    given = next((one for one in sample.prompt.media if one.kind == "image"), None)
    if given is None:
        raise ValueError(
            f"shapes:kept compares with the picture that is edited, and prompt {sample.prompt.id!r} has none: take the "
            "prompts from the data set 'shape_edits', or remove the reward"
        )
    before, after = (coverage(one, meta) for one in (open_image(given).resize(image.size), image))
    if meta.get("edit") == "place":
        before, after = before.sum(keepdims=True), after.sum(keepdims=True)
    return float(np.minimum(before, after).sum() / max(np.maximum(before, after).sum(), 1e-6))


def coverage(image: Image.Image, meta: Mapping[str, Any]) -> Array:
    """How much of each pixel differs from the background, ``[H, W]`` in [0, 1], at the size that is judged."""
    base = np.asarray(meta["background"], np.float32)
    shown = _visibility(resampled(image) - base, np.array(list(meta["palette"].values()), np.float32) - base)
    return np.where(shown >= 0.25, shown, 0.0)  # what is fainter is no object


def judge(image: Image.Image, meta: Mapping[str, Any], success_weight: float = 0.5) -> dict[str, float]:
    """The parts of ``score`` for one RGB picture."""
    found, stray, centre = objects_in(image, meta["palette"], meta["background"])
    wanted = [(i, o["colour"], o["kind"]) for i, o in enumerate(meta["objects"]) for _ in range(o["count"])]
    most = max(len(wanted), len(found))
    colours, kinds = np.zeros((2, len(wanted), len(found)))
    for row, (_, colour, kind) in enumerate(wanted):
        for column, f in enumerate(found):
            colours[row, column] = _colour_grade(f, colour, meta["palette"])
            kinds[row, column] = _kind_grade(f, kind)
    matched = scipy.optimize.linear_sum_assignment(colours + kinds, maximize=True)
    pairs = tuple(np.asarray(index, np.intp) for index in matched)
    parts = {
        "count": max(0.0, 1 - abs(len(found) - len(wanted)) / len(wanted)) * clipped(1 - (stray - STRAY) / 40),
        "colour": float(colours[pairs].sum()) / most,
        "kind": float(kinds[pairs].sum()) / most,
    }
    if "side" in meta or "relation" in meta:
        places: list[list[Found]] = [[] for _ in meta["objects"]]
        for row, column in zip(*pairs, strict=True):
            places[wanted[row][0]].append(found[column])
        parts["position"] = _position_grade(meta, places, centre) * (parts["colour"] + parts["kind"]) / 2
    success = float(all(value > 1 - 1e-9 for value in parts.values()))
    graded = sum(parts.values()) / len(parts)
    return {
        "position": 1.0,
        **parts,
        "success": success,
        "score": (1 - success_weight) * graded + success_weight * success,
    }


def objects_in(
    image: Image.Image, palette: Mapping[str, Sequence[float]], background: Sequence[float]
) -> tuple[list[Found], float, tuple[float, float]]:
    """The objects in a picture, the stray area (pixels that are neither object nor background), and its middle (x, y).

    A whole picture that drifts a little in brightness keeps its objects: the background is the median of the pixels
    near to ``background``.
    """
    pixels = resampled(image)
    height, width = pixels.shape[:2]
    base = np.asarray(background, np.float32)
    near = np.linalg.norm(pixels - base, axis=-1) < COLOUR_DISTANCE
    base = np.median(pixels[near], axis=0).astype(np.float32) if near.any() else base
    shown = _visibility(pixels - base, np.array(list(palette.values()), np.float32) - base)
    labels = np.zeros(shown.shape, np.int32)
    scipy.ndimage.label(shown >= 0.5, structure=np.ones((3, 3)), output=labels)
    fringe = scipy.ndimage.grey_dilation(labels, size=(3, 3))
    unclaimed = np.where(shown >= 0.25, shown, 0.0)
    found = []
    for label in range(1, labels.max() + 1):
        inside = labels == label
        claimed = inside | ((labels == 0) & (fringe == label))
        if not AREA[0] <= shown[claimed].sum() <= AREA[1]:
            continue
        found.append(_describe(pixels, inside, claimed, base, palette))
        unclaimed[claimed] = 0.0
    return found, float(unclaimed.sum()), (width / 2, height / 2)


def _visibility(difference: Array, directions: Array) -> Array:
    """How much of each pixel is not background, in [0, 1], ``[H, W]``: its distance from the background over that of
    the palette's colour (``directions`` ``[P, 3]``, from the background) whose line it lies nearest to."""
    lengths = np.linalg.norm(directions, axis=-1)
    distance = np.linalg.norm(difference, axis=-1)
    along = difference @ (directions / lengths[:, None]).T
    return np.minimum(distance / lengths[along.argmax(-1)], 1.0)


def _describe(
    pixels: Array, inside: NDArray[np.bool_], claimed: NDArray[np.bool_], base: Array, palette: Mapping[str, Any]
) -> Found:
    core = np.asarray(scipy.ndimage.binary_erosion(inside), np.bool_)
    interior = pixels[core if core.sum() >= 4 else inside]
    rgb = np.median(interior, axis=0)
    colours = np.array(list(palette.values()), np.float32)
    distances = np.linalg.norm(interior[:, None] - colours, axis=-1)
    nearest = np.where(distances.min(1) <= PIXEL_DISTANCE, distances.argmin(1), -1)
    line = rgb - base
    coverage = np.clip((pixels - base) @ line / max(float(line @ line), 1.0), 0, 1) * claimed
    area = float(coverage.sum())
    x = float(coverage.sum(0) @ (np.arange(coverage.shape[1]) + 0.5)) / area
    y = float(coverage.sum(1) @ (np.arange(coverage.shape[0]) + 0.5)) / area
    return Found(
        x=x,
        y=y,
        area=area,
        rgb=rgb,
        shares={name: float((nearest == i).mean()) for i, name in enumerate(palette)},
        unevenness=float(np.sqrt(((interior - rgb) ** 2).sum(-1).mean())),
        overlaps={kind: _overlap(kind, coverage, x, y, area) for kind in OVERLAP},
    )


def _overlap(kind: str, coverage: Array, x: float, y: float, area: float) -> float:
    """The best soft intersection over union of ``coverage`` with the templates of ``kind`` of about its centre and
    area. What lies outside the picture counts as not covered."""
    radius = np.sqrt(area / _UNIT_AREA[kind])
    if kind == "triangle":
        y -= 0.2 * radius  # its centre of mass lies below the middle of its height
    templates, areas = _templates(kind)
    size = int(np.clip(round((radius - _RADII[0]) / _STEP), 1, len(_RADII) - 2))
    left, top = int(np.floor(x)), int(np.floor(y))
    i, j = (round((v - np.floor(v)) / _STEP) for v in (y, x))
    near = (
        slice(None),
        slice(size - 1, size + 2),
        slice(i, i + 2 * _JITTER + 1),
        slice(j, j + 2 * _JITTER + 1),
    )
    canvas = np.pad(coverage, _WINDOW // 2)
    window = canvas[top : top + _WINDOW, left : left + _WINDOW]
    shared = np.minimum(templates[near], window).sum((-1, -2))
    return float((shared / (areas[near] + area - shared)).max())


@functools.cache
def _templates(kind: str) -> tuple[Array, Array]:
    """Coverage for every softness and radius, at offsets of whole ``_STEP``, ``[S, R, O, O, W, W]``, and its area
    ``[S, R, O, O]``. At offset ``_JITTER`` the centre is the window's middle."""
    fine = round(1 / _STEP)
    at = (np.arange(_WINDOW * fine) + 0.5) / fine - _WINDOW / 2
    offsets = range(-_JITTER, fine + _JITTER + 1)
    out = np.empty((len(_SOFTNESS), len(_RADII), len(offsets), len(offsets), _WINDOW, _WINDOW), np.float32)
    for s, softness in enumerate(_SOFTNESS):
        for r, radius in enumerate(_RADII):
            mask = _mask(kind, at[None, :] / radius, at[:, None] / radius).astype(np.float32)
            mask = scipy.ndimage.gaussian_filter(mask, softness * fine) if softness else mask
            for i, dy in enumerate(offsets):
                for j, dx in enumerate(offsets):
                    moved = np.roll(mask, (dy, dx), (0, 1))
                    out[s, r, i, j] = moved.reshape(_WINDOW, fine, _WINDOW, fine).mean((1, 3))
    return out, out.sum((-1, -2))


def _mask(kind: str, x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.bool_]:
    """Where a shape of radius 1 is, ``y`` pointing down."""
    if kind == "circle":
        return x**2 + y**2 <= 1
    if kind == "square":
        return np.maximum(abs(x), abs(y)) <= 0.9
    if kind == "triangle":
        return (y <= 0.8) & (abs(x) * 1.8 <= y + 1)
    arm, reach = np.minimum(abs(x), abs(y)), np.maximum(abs(x), abs(y))
    return (arm <= 0.36) & (reach <= 1)


def _colour_grade(found: Found, name: str, palette: Mapping[str, Any]) -> float:
    """1 if the object has the colour ``name`` throughout; falls with impurity, distance and unevenness."""
    distance = float(np.linalg.norm(found.rgb - np.asarray(palette[name], np.float32)))
    return (
        clipped(found.shares[name] / PURITY)
        * clipped(2 - distance / COLOUR_DISTANCE)
        * clipped(2 - found.unevenness / UNEVENNESS)
    )


def _kind_grade(found: Found, kind: str) -> float:
    """1 if ``kind`` overlaps enough and leads; 0 at a poor overlap or where another kind fits clearly better."""
    overlap = found.overlaps[kind]
    lead = overlap - max(value for other, value in found.overlaps.items() if other != kind)
    return clipped((overlap - 0.6) / (OVERLAP[kind] - 0.6)) * clipped((lead + 0.1) / (LEAD + 0.1))


def _position_grade(meta: Mapping[str, Any], places: list[list[Found]], centre: tuple[float, float]) -> float:
    """1 if the objects stand as the prompt says, falling to 0 within a few pixels on the wrong side."""
    if not all(places):
        return 0.0
    points = [(np.mean([f.x for f in fs]), np.mean([f.y for f in fs])) for fs in places]
    (x0, y0), (x1, y1) = (points[0], centre) if "side" in meta else points[:2]
    word = (meta.get("side") or meta["relation"]).removesuffix(" of")
    dx, dy = float(x1 - x0), float(y1 - y0)
    along = {"left": dx, "right": -dx, "top": dy, "above": dy, "bottom": -dy, "below": -dy}[word]
    if "side" in meta:
        return clipped(0.5 + along / (2 * SIDE_MARGIN))
    across = abs(dy) if word in ("left", "right") else abs(dx)
    return clipped(along / APART) * clipped(2 - across / max(along, 1e-6))


def resampled(image: Image.Image) -> Array:
    """Float RGB ``[H, W, 3]``, resampled so that the shorter side is ``SIZE``."""
    scale = SIZE / min(image.size)
    if scale != 1:
        size = (round(image.width * scale), round(image.height * scale))
        image = image.resize(size, Image.Resampling.BOX if scale < 1 else Image.Resampling.BICUBIC)
    return np.asarray(image, np.float32)


def clipped(value: float) -> float:
    """``value``, brought into [0, 1]."""
    return min(max(value, 0.0), 1.0)


def _checked_image(sample: Sample) -> Image.Image:
    image = sample.image
    if image is None or image.mode != "RGB" or min(image.size) < SMALLEST_SIDE:
        got = "none" if image is None else f"{image.mode} {image.width}x{image.height}"
        raise ValueError(
            f"the shapes reward needs an RGB image of at least {SMALLEST_SIDE} pixels a side, and the sample of "
            f"{sample.prompt.id!r} has {got}: use a pipeline that makes images, sampling.height and sampling.width of "
            f"{SMALLEST_SIDE} or more, and image.convert('RGB')"
        )
    return image


def _checked_meta(prompt: Prompt) -> Mapping[str, Any]:
    missing = [key for key in ("objects", "palette", "background") if not prompt.meta.get(key)]
    if missing:
        raise ValueError(
            f"the shapes reward needs {', '.join(missing)} in the meta of prompt {prompt.id!r}: take the prompts from "
            "the data set 'shapes', or choose a reward that does not need a scene's truth"
        )
    return prompt.meta
