"""Charts of a run for a notebook, which shows them by itself, and for a page of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from mmrl.config.errors import did_you_mean
from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.secrets import hidden
from mmrl.report.charts import Series, line_chart
from mmrl.report.html import head_of, template
from mmrl.report.recorded import RecordedRun, read_run

_ROW_PX, _HEAD_PX, _MOST_PX = 290, 60, 900
_TILES_PX = 110
_SPREAD = "reward/std"
_NOT_ALONE = (_SPREAD, "reward/dropped")
"""Metrics that are drawn where they are asked for by their whole name."""


@dataclass(frozen=True)
class Plot:
    """Charts of the run ``name``. A notebook shows them, with values under the pointer and by arrow keys. ``html`` is
    the page that it shows."""

    name: str
    metrics: tuple[str, ...]
    html: str
    height: int
    """Pixels in a notebook."""

    def __repr__(self) -> str:
        return f"Plot of {self.name}: {', '.join(self.metrics)}"

    def _repr_html_(self) -> str:
        return self.frame

    @property
    def frame(self) -> str:
        """The page in a frame, so that neither its style nor its script touches what it stands in."""
        style = Markup("width: 100%; height: {}px; border: 0").format(self.height)
        return Markup('<iframe title="{}" srcdoc="{}" sandbox="allow-scripts" style="{}"></iframe>').format(
            repr(self), self.html, style
        )

    def save(self, path: str | Path) -> Path:
        """Write the charts as one HTML file; returns its path."""
        write_atomic(Path(path), self.html)
        return Path(path)


def plot_of(run: Path, names: Sequence[str] = (), *, tiles: bool = False) -> Plot:
    """Charts of the metrics ``names`` of ``run`` over its steps, in training and in evaluations: one for each metric of
    that name, or that begins with it (``reward``, ``policy``). Without a name: the mean reward, and what evaluations
    measure, at most four. ``tiles``: with the main figures of the run above.

    Raises ``UserError`` for a name that the run has no number of.
    """
    found = read_run(run)
    drawn: dict[str, Markup] = {}
    main = [key for key in ("reward/mean", *(key for key, *_ in found.measured)) if key in _metrics(found)]
    for name in names or main[:4]:
        drawn |= dict(_charts(found, name))
    shown = head_of(found)["tiles"] if tiles else []
    title = str(found.resolved.get("name") or run.resolve().name)
    page = template("plots.html").render(name=title, status=found.status, tiles=shown, charts=list(drawn.values()))
    height = _HEAD_PX + _TILES_PX * bool(shown) + _ROW_PX * -(-max(1, len(drawn)) // 2)
    return Plot(title, tuple(drawn), hidden(page), min(_MOST_PX, height))


def _charts(run: RecordedRun, name: str) -> Iterator[tuple[str, Markup]]:
    known = _metrics(run)
    below = [key for key in known if key.rpartition("/")[0] == name and key not in _NOT_ALONE]
    keys = [name] if name in known else below
    if not keys:
        near = did_you_mean(name, [*known, *{key.rpartition("/")[0] for key in known}])
        raise UserError(f"{run.path} has no metric {name!r}{near}")
    for key in keys:
        held = [(row["step"], row.get(key)) for row in run.heldout]
        spread = [value for _, value in run.column(_SPREAD)] if key == "reward/mean" else None
        training = Series(
            "training", run.column(key), "faint" if any(y is not None for _, y in held) else "line", spread
        )
        chart = line_chart(key, [Series("held-out", held, "dots"), training])
        if chart is not None:
            yield key, chart


def _metrics(run: RecordedRun) -> list[str]:
    rows = [*run.metrics, *run.heldout]
    return list(dict.fromkeys(key for row in rows for key, y in row.items() if key != "step" and y is not None))
