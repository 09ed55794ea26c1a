"""The samples in a report: texts, and pictures, reduced if large and embedded as data URIs."""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from PIL import Image
from pydantic import BaseModel, Field

from mmrl.core.episode import Line, lines_in
from mmrl.core.json_types import elements
from mmrl.core.media import evenly
from mmrl.core.media.images import frames_of
from mmrl.core.stored import BadFileError, read_as
from mmrl.core.untrusted import inside
from mmrl.logging.grids import moving, rgb, score_line
from mmrl.logging.texts import fold, visible

SLIDER_STEPS = 12
"""The most evaluations of the slider; of more, the first, the last and others at even distances."""
EDGE = 256
"""Pixels of the longest side in the report; larger pictures are shrunk (the originals stay in samples/)."""
THUMBNAIL = 128
"""Pixels of the longest side of a picture that belongs to a prompt."""
ENDS = 6
"""Lowest and highest samples shown, each."""
MEDIA = 8
"""Pictures of one prompt that are shown."""


@dataclass(frozen=True)
class Shown:
    """One sample of an evaluation: a picture (``path``), or a ``text`` with the ``media`` of its prompt, and all
    ``turns`` where it is an episode."""

    prompt: str
    scores: dict[str, float]
    path: Path | None = None
    text: str | None = None
    truncated: bool = False
    media: tuple[Path, ...] = ()
    turns: tuple[tuple[Line, Path | None], ...] = ()
    """Of an episode: its lines, with the pictures that they name."""


class Listing(BaseModel):
    """The schema of ``samples/step_000000.json``: what each sample is, and its scores."""

    step: Annotated[int, Field(ge=-1, le=10**9, strict=True)]
    samples: list[Any]


@dataclass(frozen=True)
class Evaluation:
    """The samples kept of the evaluation at ``step``, by prompt and its n-th occurrence there."""

    step: int
    samples: dict[tuple[str, int], Shown]

    @property
    def texts(self) -> bool:
        """Whether these are responses and not pictures."""
        return any(shown.text is not None for shown in self.samples.values())


def read_evaluations(folder: Path) -> list[Evaluation]:
    """The evaluations whose list is in ``samples/``, by step. Pictures outside the folder are not taken."""
    found = []
    for listing in sorted(folder.glob("step_*.json")):
        try:
            content = read_as(Listing, listing)
        except (OSError, BadFileError):
            continue
        seen: Counter[str] = Counter()
        samples = {}
        for row in content.samples:
            shown = _shown(folder, row)
            if shown is not None:
                samples[shown.prompt, seen[shown.prompt]] = shown
                seen[shown.prompt] += 1
        if samples:
            found.append(Evaluation(content.step, samples))
    return sorted(found, key=lambda e: e.step)


def pairs(evaluations: list[Evaluation]) -> dict[str, Any] | None:
    """The same prompts and seeds at the first evaluation and, by slider, at later ones. None before the first."""
    if not evaluations:
        return None
    chosen = evenly(evaluations, SLIDER_STEPS)
    last = chosen[-1]
    keys = [key for key in chosen[0].samples if key in last.samples] or list(last.samples)
    steps = [evaluation.step for evaluation in chosen]
    return {"steps": steps, "texts": last.texts, "cells": [_cell(key, chosen, last) for key in keys]}


def side_by_side(evaluations: list[Evaluation], most: int) -> dict[str, Any] | None:
    """The same prompts and seeds at ``evaluations`` of several runs, at most ``most`` of them at even distances; None
    where they share none."""
    shared = [key for key in evaluations[0].samples if all(key in of.samples for of in evaluations)]
    if not shared:
        return None
    count = min(most, len(shared))
    keys = [shared[i * len(shared) // count] for i in range(count)]
    return {"texts": evaluations[0].texts, "cells": [_cell(key, evaluations, evaluations[0]) for key in keys]}


def _cell(key: tuple[str, int], evaluations: list[Evaluation], beside: Evaluation) -> dict[str, Any]:
    """A sample at each of ``evaluations``; what is the same at all of them is that of ``beside``."""
    frames = [_frame(evaluation.samples.get(key)) for evaluation in evaluations]
    return {"prompt": key[0], "frames": frames, **_beside(beside.samples.get(key))}


def extremes(evaluations: list[Evaluation], weights: dict[str, float]) -> dict[str, Any] | None:
    """The lowest and highest of the last evaluation's samples by weighted reward, or None where nothing has a score.

    Without a known weight the first score of each sample decides.
    """
    if not evaluations:
        return None
    last = evaluations[-1]
    ranked = sorted(
        ((total, shown) for shown in last.samples.values() if (total := _total(shown.scores, weights)) is not None),
        key=lambda pair: pair[0],
    )
    if not ranked:
        return None
    count = min(ENDS, len(ranked) // 2) or 1
    return {
        "step": last.step,
        "kept": len(ranked),
        "texts": last.texts,
        "lowest": [_card(shown) for _, shown in ranked[:count]],
        "highest": [_card(shown) for _, shown in reversed(ranked[-count:])],
    }


def embed(path: Path, edge: int = EDGE) -> str | None:
    """A picture, or a clip that moves, as a data URI of at most ``edge`` pixels; None where the file is neither."""
    try:
        with Image.open(path) as image:
            if max(image.size) <= edge:
                content, kind = path.read_bytes(), Image.MIME[image.format or "PNG"]
            elif getattr(image, "n_frames", 1) > 1:
                frames = frames_of(image)
                for frame in frames:
                    frame.thumbnail((edge, edge))
                content, kind = moving(frames, lossless=False), "image/webp"
            else:
                small = rgb(image)
                small.thumbnail((edge, edge))
                buffer = io.BytesIO()
                small.save(buffer, "JPEG", quality=85)
                content, kind = buffer.getvalue(), "image/jpeg"
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _shown(folder: Path, row: object) -> Shown | None:
    if not isinstance(row, dict):
        return None
    given = row.get("scores")
    scores = given if isinstance(given, dict) else {}
    finite = {str(k): float(v) for k, v in scores.items() if isinstance(v, int | float) and math.isfinite(v)}
    prompt = str(row.get("prompt", ""))
    if isinstance(row.get("text"), str):
        turns = tuple((line, inside(folder, line.picture or None)) for line in lines_in(row.get("turns")))
        told = [line.picture for line, _ in turns]
        media = [inside(folder, name) for name in elements(row.get("pictures")) if name not in told]
        found = tuple(path for path in media if path is not None)
        cut = row.get("truncated") is True
        return Shown(prompt, finite, text=row["text"], truncated=cut, media=found, turns=turns)
    path = inside(folder, row.get("file"))
    return None if path is None else Shown(prompt, finite, path)


def _frame(shown: Shown | None) -> dict[str, Any]:
    """A sample at one evaluation; empty where that evaluation did not keep it."""
    if shown is None:
        return {"src": "", "text": None, "truncated": False, "scores": "", "turns": []}
    text = None if shown.text is None else fold(shown.text)
    src = embed(shown.path) if shown.path else None
    scores = score_line(shown.scores) if src or text else ""
    return {"src": src or "", "text": text, "truncated": shown.truncated, "scores": scores, "turns": _turns(shown)}


def _turns(shown: Shown) -> list[dict[str, Any]]:
    """The lines of an episode, folded, with the first of their pictures embedded."""
    pictures = [path for _, path in shown.turns if path is not None]
    more = len(pictures) - MEDIA
    left_out = [(Line("end", f"{more} more pictures"), None)] if more > 0 else []
    found: list[dict[str, Any]] = []
    for line, path in (*shown.turns, *left_out):
        src = embed(path, THUMBNAIL) if path is not None and path in pictures[:MEDIA] else None
        text = "" if src else line.text or ("(a picture that is not shown)" if line.picture else "")
        one = {"by": line.by, "name": visible(line.name), "text": fold(text) if text else None}
        found.append({**one, "src": src, "pixelated": bool(src) and _pixelated(path)})
    return found


def _beside(shown: Shown | None) -> dict[str, Any]:
    """The parts of a sample that are the same at every step: the prompt of a text, folded, and its pictures."""
    media = () if shown is None else shown.media
    embedded = [(embed(path, THUMBNAIL), _pixelated(path)) for path in media[:MEDIA]]
    return {
        "pixelated": shown is not None and _pixelated(shown.path),
        "asked": fold("" if shown is None else shown.prompt),
        "media": [{"src": src, "pixelated": pixelated} for src, pixelated in embedded if src],
        "more": max(0, len(media) - MEDIA),
    }


def _total(scores: dict[str, float], weights: dict[str, float]) -> float | None:
    weighted = [weight * scores[label] for label, weight in weights.items() if label in scores]
    return sum(weighted) if weighted else next(iter(scores.values()), None)


def _card(shown: Shown) -> dict[str, Any]:
    return {"prompt": shown.prompt, **_frame(shown), **_beside(shown), "scores": list(shown.scores.items())}


def _pixelated(path: Path | None) -> bool:
    """Whether a picture is so small that its pixels are shown as such."""
    if path is None:
        return False
    try:
        with Image.open(path) as image:
            return max(image.size) < 128
    except (OSError, ValueError, Image.DecompressionBombError):
        return False
