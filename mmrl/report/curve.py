"""The held-out curve of one run, or of the seeds of one recipe, as a small picture for a README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from PIL import Image, ImageDraw, ImageFont

from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.media.images import png_bytes
from mmrl.logging.metrics import read_numbers
from mmrl.logging.rundir import RunDir
from mmrl.report.charts import short, ticks

At = TypeVar("At", bound=float)
"""Steps or seconds."""
_BACK, _INK, _DIM, _RULE, _LINE, _FAINT = "#fafaf8", "#1c1c1e", "#696c72", "#e2e2de", "#2f6fb3", "#a9c6e2"
_OVER = 2
"""Drawn this much larger and shrunk, for smooth lines."""


def curve_png(
    runs: Path | Sequence[Path],
    out: Path,
    label: str | None = None,
    title: str | None = None,
    size: tuple[int, int] = (480, 280),
) -> Path:
    """Write the picture that ``curve_picture`` draws to ``out``; returns it. Raises ``UserError`` as that does."""
    write_atomic(out, png_bytes(curve_picture(runs, label, title, size), optimize=True))
    return out


def curve_picture(
    runs: Path | Sequence[Path],
    label: str | None = None,
    title: str | None = None,
    size: tuple[int, int] = (480, 280),
) -> Image.Image:
    """Draw ``reward/<label>`` of heldout.jsonl over training steps; several runs thin, with their mean in bold.

    ``label`` None takes the first reward of the first run. Raises ``UserError`` where a run has no evaluation of it.
    """
    paths = [runs] if isinstance(runs, Path) else list(runs)
    key = f"reward/{label}" if label else _first_label(paths[0])
    curves = [_curve(path, key) for path in paths]
    steps = sorted(set.intersection(*[set(curve) for curve in curves]))
    mean = {step: sum(curve[step] for curve in curves) / len(curves) for step in steps}
    return panel(curves, mean, title or f"held-out {key.removeprefix('reward/')} over training steps", size)


def _first_label(path: Path) -> str:
    for row in read_numbers(RunDir(path).heldout):
        for key in row:
            if key.startswith("reward/") and key.count("/") == 1:
                return key
    raise UserError(f"{path} has no held-out evaluation to draw yet; set eval.every in the recipe, or wait for one")


def _curve(path: Path, key: str) -> dict[int, float]:
    found = {row["step"]: row[key] for row in read_numbers(RunDir(path).heldout) if row.get(key) is not None}
    if not found:
        raise UserError(f"{path} has no held-out {key}; give the label of a reward that heldout.jsonl has")
    return found


def panel(
    curves: Sequence[Mapping[At, float]],
    mean: Mapping[At, float],
    title: str,
    size: tuple[int, int],
    reach: tuple[float, float] | None = None,
) -> Image.Image:
    """A picture of ``curves`` (step or seconds to value), thin, and of their ``mean``, bold.

    ``reach``: lowest and highest value of the scale, those of the curves where None.
    """
    k = _OVER
    width, height = size[0] * k, size[1] * k
    left, right, top, bottom = 52 * k, 22 * k, 40 * k, 34 * k
    every = [value for curve in curves for value in curve.values()]
    y_ticks, last = ticks(*(reach or (min(every), max(every)))), max(step for curve in curves for step in curve)

    def at(step: float, value: float) -> tuple[float, float]:
        across = step / (last or 1) * (width - left - right)
        up = (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (height - top - bottom)
        return left + across, height - bottom - up

    sheet = Image.new("RGB", (width, height), _BACK)
    pen = ImageDraw.Draw(sheet)
    font, head = ImageFont.load_default(size=12 * k), ImageFont.load_default(size=14 * k)
    pen.text((16 * k, 12 * k), title, fill=_INK, font=head)
    for value in y_ticks:
        _, y = at(0, value)
        pen.line((left, y, width - right, y), fill=_RULE, width=k)
        pen.text((left - 8 * k, y), short(value), fill=_DIM, font=font, anchor="rm")
    for step in ticks(0, last, 6):
        if step <= last and step == int(step):
            pen.text((at(step, 0)[0], height - bottom + 8 * k), str(int(step)), fill=_DIM, font=font, anchor="ma")
    if len(curves) > 1:
        for curve in curves:
            pen.line([at(*point) for point in sorted(curve.items())], fill=_FAINT, width=k, joint="curve")
    points = [at(*point) for point in sorted(mean.items())]
    pen.line(points, fill=_LINE, width=2 * k + 1, joint="curve")
    for x, y in points:
        pen.ellipse((x - 3 * k, y - 3 * k, x + 3 * k, y + 3 * k), fill=_LINE)
    if mean:
        first, final = mean[min(mean)], mean[max(mean)]
        text = f"{short(round(first, 3))} to {short(round(final, 3))}"
        pen.text((width - right, 14 * k), text, fill=_LINE, font=font, anchor="ra")
    return sheet.resize(size, Image.Resampling.LANCZOS)
