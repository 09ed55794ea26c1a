"""The sample pictures of a report: read from a run, shrunk where large, embedded as data URIs."""

from __future__ import annotations

import base64
import io
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLIDER_STEPS = 12
"""Evaluations a reader can slide through; of more, the first, the last and others evenly between."""
EDGE = 256
"""Pixels of the longest side in the report; larger pictures are shrunk (the originals stay in samples/)."""
ENDS = 6
"""Lowest and highest samples shown, each."""


@dataclass(frozen=True)
class Shown:
    """One sample of an evaluation."""

    prompt: str
    path: Path
    scores: dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """The samples kept of the evaluation at ``step``, by prompt and its n-th occurrence there."""

    step: int
    samples: dict[tuple[str, int], Shown]


def read_evaluations(folder: Path) -> list[Evaluation]:
    """The evaluations whose list is in ``samples/``, by step. Pictures outside the folder are not taken."""
    found = []
    for listing in sorted(folder.glob("step_*.json")):
        try:
            content = json.loads(listing.read_text(encoding="utf-8"))
            step, rows = int(content["step"]), list(content["samples"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        seen: Counter[str] = Counter()
        samples = {}
        for row in rows:
            shown = _shown(folder, row)
            if shown is not None:
                samples[shown.prompt, seen[shown.prompt]] = shown
                seen[shown.prompt] += 1
        if samples:
            found.append(Evaluation(step, samples))
    return sorted(found, key=lambda e: e.step)


def pairs(evaluations: list[Evaluation]) -> dict[str, Any] | None:
    """The same prompts and seeds at the first evaluation and, by slider, at later ones. None before the first."""
    if not evaluations:
        return None
    chosen = _evenly(evaluations, SLIDER_STEPS)
    keys = [key for key in chosen[0].samples if key in chosen[-1].samples] or list(chosen[-1].samples)
    cells = []
    for key in keys:
        frames = []
        for evaluation in chosen:
            shown = evaluation.samples.get(key)
            uri = embed(shown.path) if shown else None
            frames.append({"src": uri or "", "scores": score_text(shown.scores) if shown and uri else ""})
        cells.append({"prompt": key[0], "frames": frames, "pixelated": _pixelated(chosen[-1].samples.get(key))})
    return {"steps": [evaluation.step for evaluation in chosen], "cells": cells}


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
        "lowest": [_card(shown) for _, shown in ranked[:count]],
        "highest": [_card(shown) for _, shown in reversed(ranked[-count:])],
    }


def embed(path: Path) -> str | None:
    """A picture as a data URI of at most ``EDGE`` pixels; None where the file is no picture."""
    from PIL import Image

    from mmrl.report.grids import rgb

    try:
        with Image.open(path) as image:
            if max(image.size) <= EDGE:
                content, kind = path.read_bytes(), Image.MIME[image.format or "PNG"]
            else:
                small = rgb(image)
                small.thumbnail((EDGE, EDGE))
                buffer = io.BytesIO()
                small.save(buffer, "JPEG", quality=85)
                content, kind = buffer.getvalue(), "image/jpeg"
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def score_text(scores: dict[str, float]) -> str:
    """The labels' scores of one sample, without their parts."""
    from mmrl.report.grids import score_line

    return score_line(scores)


def _shown(folder: Path, row: object) -> Shown | None:
    if not isinstance(row, dict) or not isinstance(row.get("file"), str):
        return None
    path = folder / row["file"]
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        return None
    given = row.get("scores")
    scores = given if isinstance(given, dict) else {}
    finite = {str(k): float(v) for k, v in scores.items() if isinstance(v, int | float) and math.isfinite(v)}
    return Shown(str(row.get("prompt", "")), path, finite)


def _evenly(evaluations: list[Evaluation], most: int) -> list[Evaluation]:
    if len(evaluations) <= most:
        return evaluations
    return [evaluations[round(i * (len(evaluations) - 1) / (most - 1))] for i in range(most)]


def _total(scores: dict[str, float], weights: dict[str, float]) -> float | None:
    weighted = [weight * scores[label] for label, weight in weights.items() if label in scores]
    return sum(weighted) if weighted else next(iter(scores.values()), None)


def _card(shown: Shown) -> dict[str, Any]:
    return {
        "prompt": shown.prompt,
        "src": embed(shown.path) or "",
        "pixelated": _pixelated(shown),
        "scores": list(shown.scores.items()),
    }


def _pixelated(shown: Shown | None) -> bool:
    from PIL import Image

    if shown is None:
        return False
    try:
        with Image.open(shown.path) as image:
            return max(image.size) < 128
    except (OSError, ValueError):
        return False
