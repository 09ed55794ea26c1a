"""soup_report.html: the front, the measures, and a slider over held-out samples of the merges; one file, offline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mmrl.core.files import write_atomic
from mmrl.core.secrets import hidden
from mmrl.logging.grids import write_samples
from mmrl.logging.pictures import read_evaluations, side_by_side
from mmrl.logging.rundir import RunDir
from mmrl.logging.texts import write_texts
from mmrl.report.charts import short, ticks
from mmrl.report.html import template
from mmrl.studies.soup.evaluation import SHOWN, Front, SoupReport
from mmrl.studies.soup.formulas import Point, guaranteed_interval
from mmrl.training.evaluation import Made

PAGE = "soup_report.html"
_WIDTH, _HEIGHT, _EDGE, _TOP = 420, 300, 48, 20


def write_page(made: SoupReport) -> Path:
    """Write the page into the soup's folder and return it."""
    labels = made.soup.rewards
    page = template("soup.html").render(
        title=f"{labels[0]} and {labels[1]}",
        labels=labels,
        soup=made.soup,
        steps=made.steps,
        samples=made.samples,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        interval=[f"{edge:.2f}" for edge in guaranteed_interval(made.soup.beta)],
        stops=[f"{a:.3g} {labels[0]}, {b:.3g} {labels[1]}" for a, b in (one.mu for one in made.bone.points)],
        rows=_rows(made),
        measures=_measures(made),
        chart=_chart(made),
        wall=_wall(made.kept),
    )
    path = made.soup.path / PAGE
    write_atomic(path, hidden(page))
    return path


def _fronts(made: SoupReport) -> list[tuple[str, Front]]:
    found = [("this soup", made.bone), ("its backbones, lambda = mu", made.direct)]
    return found + [(_named(one.path, one.beta), one.front) for one in made.beside if one.front is not None]


def _named(path: Path, beta: float | None) -> str:
    if beta is None:
        return f"the run {path.name}"
    return f"{path.name} ({'Rewarded Soup' if beta == 1 else f'beta {beta:g}'})"


def _alone(made: SoupReport) -> list[tuple[str, Point, float]]:
    """The models that are no merge: name, rewards, hypervolume."""
    found = [(f"backbone of {label}", *one) for label, one in zip(made.soup.rewards, made.backbones, strict=True)]
    runs = [(_named(one.path, None), one.rewards, one.hypervolume) for one in made.beside if one.rewards is not None]
    return [*found, *runs]


def _rows(made: SoupReport) -> list[list[str]]:
    """The cells of each model: name, preference, backbones, both rewards."""
    rows = []
    for name, front in _fronts(made):
        for one in front.points:
            preference, weights = (", ".join(f"{w:.3g}" for w in of) for of in (one.mu, one.weights))
            rows.append([name, preference, weights, *(f"{r:.4f}" for r in one.rewards)])
    return rows + [[name, "", "", *(f"{r:.4f}" for r in rewards)] for name, rewards, _ in _alone(made)]


def _measures(made: SoupReport) -> list[list[str]]:
    """The cells of each way: name, hypervolume, controllability, sparsity."""
    rows = [
        [name, f"{of.hypervolume:.4g}", f"{of.controllability:.2f}", _number(of.sparsity)] for name, of in _fronts(made)
    ]
    return rows + [[name, f"{volume:.4g}", "", ""] for name, _, volume in _alone(made)]


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else ""


def _chart(made: SoupReport) -> dict[str, Any]:
    """Where everything stands in the picture of both rewards: fronts, single models, ticks of the axes."""
    fronts = [(name, [one.rewards for one in of.points]) for name, of in _fronts(made)]
    alone = [(name, [rewards]) for name, rewards, _ in _alone(made)]
    points = [point for _, of in (*fronts, *alone) for point in of]
    axes = [_Axis([p[i] for p in points], *ends) for i, ends in enumerate(((_EDGE, _WIDTH - 10), (_HEIGHT - 34, _TOP)))]
    drawn = [
        {"name": name, "line": n < len(fronts), "points": [(axes[0](x), axes[1](y)) for x, y in of]}
        for n, (name, of) in enumerate((*fronts, *alone))
    ]
    marks = [
        [(axis(at), short(at)) for at in ticks(axis.low, axis.high) if axis.low <= at <= axis.high] for axis in axes
    ]
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "edge": _EDGE,
        "top": _TOP,
        "drawn": drawn,
        "across": marks[0],
        "up": marks[1],
    }


class _Axis:
    """From a reward to a place in the picture."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        room = 0.05 * (max(values) - min(values)) or 0.5
        self.low, self.high = min(values) - room, max(values) + room
        self.first, self.last = first, last

    def __call__(self, value: float) -> float:
        return round(self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first), 1)


def _wall(kept: Sequence[Made]) -> dict[str, Any] | None:
    """The first samples of each merge, embedded: the same prompts and noise for all."""
    if not all(made.samples for made in kept):
        return None
    with TemporaryDirectory() as folder:
        run = RunDir(folder)
        run.samples.mkdir()
        for number, made in enumerate(kept):
            if made.samples[0].text is not None:
                write_texts(run, number, made.samples, made.scores)
            else:
                shown = [sample.image or sample.video or () for sample in made.samples]
                write_samples(run, number, shown, [sample.prompt.text for sample in made.samples], made.scores)
        return side_by_side(read_evaluations(run.samples), SHOWN)
