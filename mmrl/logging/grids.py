"""Sample grids: pictures with their prompts and scores, large enough to compare by eye."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy
from PIL import Image, ImageDraw, ImageFont

from mmrl.core.files import remove, write_atomic
from mmrl.core.json_types import finite
from mmrl.core.media import evenly
from mmrl.core.media.images import png_bytes
from mmrl.logging.rundir import RunDir

SMALL = 128
"""Pictures below this are enlarged to about it, without smoothing: every pixel stays a pixel."""
LARGE = 320
"""Pictures above this are shrunk to it in a grid (the pictures themselves are kept beside it)."""
COLUMNS = 8
"""Of an evaluation's grid."""
FPS = 8
"""Frames a second of the stored clips: a model does not say its own rate."""
Ink = tuple[int, int, int]
_BACK, _INK, _DIM, _EMPTY = (250, 250, 248), (28, 28, 30), (105, 108, 114), (232, 232, 228)
_GAP, _FONT, _LINE, _MIN_TEXT = 12, 13, 17, 120


@dataclass
class _Cell:
    """Pictures side by side, a dim note under each, and a caption under them all (its first line is the prompt)."""

    images: list[Image.Image]
    caption: str
    notes: list[str] = field(default_factory=list)


def grid(images: Sequence[Image.Image], captions: Sequence[str], columns: int) -> Image.Image:
    """Draw pictures of any sizes and modes in rows of ``columns``, each over its caption.

    The first line of a caption is the prompt, further lines (scores) are dimmer; both are wrapped to the column. Every
    picture is brought to a readable size. Returns RGB. Raises ``ValueError`` for no pictures, fewer than one column, or
    a number of captions that differs.
    """
    if len(images) != len(captions):
        raise ValueError(f"{len(images)} pictures but {len(captions)} captions")
    return _draw([_Cell([_fit(image)], text) for image, text in zip(images, captions, strict=True)], columns)


def before_after(
    before: Sequence[Image.Image],
    after: Sequence[Image.Image],
    captions: Sequence[str],
    notes: Sequence[tuple[str, str]] | None = None,
    columns: int = 4,
) -> Image.Image:
    """Draw pairs of pictures of the same prompts and seeds, in rows of ``columns`` pairs.

    ``notes`` stand under the two pictures of each pair (``before`` and ``after`` where none are given). Raises
    ``ValueError`` as ``grid`` does.
    """
    notes = [("before", "after")] * len(captions) if notes is None else notes
    if not len(before) == len(after) == len(captions) == len(notes):
        raise ValueError(
            f"{len(before)} pictures before, {len(after)} after, {len(captions)} captions, {len(notes)} notes"
        )
    rows = zip(before, after, captions, notes, strict=True)
    return _draw([_Cell([_fit(a), _fit(b)], text, list(note)) for a, b, text, note in rows], columns)


def film_strip(frames: Sequence[Image.Image], most: int = 5) -> Image.Image:
    """``most`` frames of a clip at even distances, first and last among them, side by side."""
    shown = evenly(frames, most)
    width, height = shown[0].size
    strip = Image.new("RGB", (len(shown) * width, height))
    for i, frame in enumerate(shown):
        strip.paste(frame, (i * width, 0))
    return strip


def write_samples(
    run: RunDir,
    step: int,
    made: Sequence[Image.Image | Sequence[Image.Image]],
    prompts: Sequence[str],
    scores: Sequence[Mapping[str, float]],
) -> Image.Image:
    """Keep the pictures of an evaluation, or its clips (frames in order), in ``samples/`` and return the grid of them.

    Pictures are kept as PNG, clips as WebP that moves; the grid shows a clip's ``film_strip``.
    ``scores`` are keyed ``label`` and ``label/part``; the grid shows those of the labels.
    The list ``step_NNNNNN.json`` is written last: where it stands, the pictures it names are whole. Raises
    ``ValueError`` where the three differ in length.
    """
    if not len(made) == len(prompts) == len(scores):
        raise ValueError(f"{len(made)} pictures, {len(prompts)} prompts, {len(scores)} rows of scores")
    clips = [None if isinstance(one, Image.Image) else list(one) for one in made]
    images = [one if isinstance(one, Image.Image) else film_strip(one) for one in made]
    name = f"step_{step:06d}"
    captions = [f"{_flat(p)}\n{score_line(s)}" for p, s in zip(prompts, scores, strict=True)]
    picture = grid(images, captions, COLUMNS)
    (run.samples / f"{name}.json").unlink(missing_ok=True)
    partial = run.samples / f".{name}.{os.getpid()}.tmp"
    remove(partial)
    partial.mkdir(parents=True)
    samples = []
    for i, (image, clip, prompt, row) in enumerate(zip(images, clips, prompts, scores, strict=True)):
        file = f"{i:03d}.{'webp' if clip else 'png'}"
        if clip:
            (partial / file).write_bytes(moving(clip))
        else:
            storable = image if image.mode in ("RGB", "RGBA", "L") else rgb(image)
            storable.save(partial / file)
        samples.append(
            {"prompt": prompt, "file": f"{name}/{file}", "scores": {k: finite(float(v)) for k, v in row.items()}}
        )
    remove(run.samples / name)
    partial.rename(run.samples / name)
    write_atomic(run.samples / f"{name}.png", png_bytes(picture, optimize=True))
    listing = {"step": step, "columns": COLUMNS, "samples": samples}
    write_atomic(run.samples / f"{name}.json", json.dumps(listing, indent=1, ensure_ascii=False) + "\n")
    return picture


def moving(frames: Sequence[Image.Image], *, lossless: bool = True) -> bytes:
    """A clip as WebP that plays without end, ``FPS`` frames a second."""
    buffer = io.BytesIO()
    first, *others = (rgb(frame) for frame in frames)
    first.save(
        buffer, "WEBP", save_all=True, append_images=others, duration=1000 // FPS, loop=0, lossless=lossless, quality=80
    )
    return buffer.getvalue()


def score_line(scores: Mapping[str, float]) -> str:
    """``shapes=1 jpeg=0.412``: the scores of one sample, without their parts."""
    return " ".join(f"{key}={value:.3g}" for key, value in scores.items() if "/" not in key)


def rgb(image: Image.Image) -> Image.Image:
    """The picture as RGB, whatever its mode: transparency over a light ground, deeper grey cut to 8 bits."""
    if image.mode.startswith("I;16"):
        image = Image.fromarray((numpy.asarray(image) >> 8).astype(numpy.uint8))
    elif image.mode in ("I", "F"):
        image = Image.fromarray(numpy.nan_to_num(numpy.asarray(image)).clip(0, 255).astype(numpy.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        ground = Image.new("RGBA", image.size, (*_BACK, 255))
        return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _fit(image: Image.Image) -> Image.Image:
    image = rgb(image)
    longest = max(image.size)
    if longest < SMALL:
        factor = -(-SMALL // longest)
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    if longest > LARGE:
        size = (max(1, round(image.width * LARGE / longest)), max(1, round(image.height * LARGE / longest)))
        return image.resize(size, Image.Resampling.LANCZOS)
    return image


def _draw(cells: list[_Cell], columns: int) -> Image.Image:
    if not cells or columns < 1:
        raise ValueError(f"a grid of {len(cells)} pictures in {columns} columns; it needs at least one of each")
    columns = min(columns, len(cells))
    font = ImageFont.load_default(size=_FONT)
    slot = max(image.width for cell in cells for image in cell.images)
    slot = max(slot, _MIN_TEXT // max(len(cell.images) for cell in cells))
    width = max(len(cell.images) * slot + (len(cell.images) - 1) * 4 for cell in cells)
    texts = [_lines(cell.caption, font, width) for cell in cells]
    rows = [range(i, min(i + columns, len(cells))) for i in range(0, len(cells), columns)]
    heights = []
    for row in rows:
        tallest = max(image.height for i in row for image in cells[i].images)
        notes = _LINE if any(cells[i].notes for i in row) else 0
        heights.append((tallest, notes, max(len(texts[i]) for i in row) * _LINE))
    sheet_height = _GAP + sum(sum(h) + 4 + _GAP for h in heights)
    sheet = Image.new("RGB", (_GAP + columns * (width + _GAP), sheet_height), _BACK)
    pen = ImageDraw.Draw(sheet)
    y = _GAP
    for row, (tallest, notes, text) in zip(rows, heights, strict=True):
        for place, i in enumerate(row):
            x = _GAP + place * (width + _GAP)
            for k, image in enumerate(cells[i].images):
                left = x + k * (slot + 4)
                pen.rectangle((left, y, left + slot - 1, y + tallest - 1), fill=_EMPTY)
                sheet.paste(image, (left + (slot - image.width) // 2, y + (tallest - image.height) // 2))
                if k < len(cells[i].notes):
                    pen.text((left, y + tallest + 3), _clip(cells[i].notes[k], font, slot), fill=_DIM, font=font)
            for line, (words, ink) in enumerate(texts[i]):
                pen.text((x, y + tallest + 4 + notes + line * _LINE), words, fill=ink, font=font)
        y += tallest + notes + text + 4 + _GAP
    return sheet


def _lines(
    caption: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int, most: int = 4
) -> list[tuple[str, Ink]]:
    """The caption in lines no wider than ``width``, each with its ink; a part longer than ``most`` lines is cut."""
    found = []
    for n, part in enumerate(caption.split("\n")):
        wrapped = _wrap(_flat(part), font, width)
        if len(wrapped) > most:
            wrapped = [*wrapped[: most - 1], _clip(wrapped[most - 1] + " …", font, width, force=True)]
        found += [(line, _INK if n == 0 else _DIM) for line in wrapped]
    return found


def _wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(joined) <= width:
            lines[-1] = joined
            continue
        while font.getlength(word) > width and len(word) > 1:  # a word wider than the column is cut
            cut = next((n for n in range(len(word) - 1, 1, -1) if font.getlength(word[:n]) <= width), 1)
            lines.append(word[:cut])
            word = word[cut:]
        lines.append(word)
    return lines if text else []


def _clip(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int, force: bool = False) -> str:
    text = _flat(text)
    if font.getlength(text) <= width and not force:
        return text
    while len(text) > 1 and font.getlength(text.rstrip(" …") + " …") > width:
        text = text.rstrip(" …")[:-1]
    return text.rstrip(" …") + " …"


def _flat(text: str) -> str:
    """``text`` as one line of printable characters: a prompt may hold any character."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:400]).split())
