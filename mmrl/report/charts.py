"""Line and stacked charts as inline SVG: no library, no network, colours from the page's CSS variables."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

WIDTH, HEIGHT = 420, 210
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 8, 22
POINTS = 400
"""Points drawn of one line; of longer ones the lowest and highest of each stretch, so that a spike stays visible."""
Point = tuple[float, float | None]
LINES: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "clip fraction",
        "",
        (
            ("all", "policy/clip_fraction"),
            ("below the range", "policy/clip_fraction_low"),
            ("above it", "policy/clip_fraction_high"),
        ),
    ),
    ("KL to the reference", "", (("KL to the reference", "policy/kl"), ("taken from the reward", "advantage/kl"))),
    ("entropy of the policy", "nats per token", (("entropy", "policy/entropy"),)),
    ("response length", "tokens, mean", (("length", "text/length"),)),
    (
        "responses cut",
        "fraction",
        (("cut at the limit", "text/truncated"), ("punished for length", "advantage/overlong_fraction")),
    ),
    (
        "dynamic sampling",
        "a step",
        (("groups", "sampling/groups"), ("unused", "sampling/ahead_unused"), ("rounds", "sampling/rounds")),
    ),
    ("KL of sampler and trainer", "nats per token", (("k3", "mismatch/kl_k3"), ("k1", "mismatch/kl"))),
    (
        "importance weight",
        "of sampler and trainer",
        (("mean", "mismatch/weight_mean"), ("fraction cut at the cap", "mismatch/weight_clipped")),
    ),
    ("steps found wrong", "fraction of tokens", (("wrong", "advantage/wrong_step_fraction"),)),
    (
        "preferences",
        "",
        (
            ("fraction told apart rightly", "dpo/accuracy"),
            ("margin", "dpo/margin"),
            ("fraction scored rightly", "reward_model/accuracy"),
            ("margin of the scores", "reward_model/margin"),
        ),
    ),
    (
        "implicit reward",
        "against the reference",
        (("better one", "dpo/chosen_reward"), ("worse one", "dpo/rejected_reward")),
    ),
    ("gradient norm", "before clipping", (("policy", "optim/grad_norm"), ("critic", "value/grad_norm"))),
    ("learning rate", "", (("policy", "optim/lr"), ("critic", "value/lr"))),
    ("loss of the critic", "", (("loss", "value/loss"),)),
    (
        "critic",
        "fractions",
        (("variance explained", "value/explained_variance"), ("values clipped", "value/clip_fraction")),
    ),
    ("groups without spread", "fraction, no advantage", (("groups without spread", "advantage/zero_std_groups"),)),
)
"""Charts of training: title, note, and the metric of each line by name; one is drawn where a metric of it is there."""


@dataclass(frozen=True)
class Series:
    """One line: ``points`` are (step, value) in order, None a gap. ``spread`` is a band of +- that much."""

    name: str
    points: Sequence[Point]
    style: Literal["line", "dots", "faint"] = "line"
    spread: Sequence[float | None] | None = None


def line_chart(
    title: str, series: Sequence[Series], note: str = "", *, log: bool = False, over: str = "step"
) -> Markup | None:
    """A figure with one line per series, or None where no series has a value.

    ``log`` draws a logarithmic axis (values of 0 at its foot) where any value is above 0. ``over``: what is across.
    """
    series = [s for s in series if any(_known(y) for _, y in s.points)]
    if not series:
        return None
    values = [y for s in series for y in _reach(s)]
    log = log and any(y > 0 for y in values)
    frame = _Frame([x for s in series for x, _ in s.points], values, log)
    drawn = [frame.axes()]
    for n, s in enumerate(series):
        if s.spread is not None:
            drawn.append(frame.band(s, n))
        drawn.append(frame.line(s, n))
    return _figure(title, note, [(s.name, s.points) for s in series], frame, drawn, over)


def stacked_chart(title: str, series: Sequence[Series], note: str = "") -> Markup | None:
    """Areas one above the other; all series have the same steps, a gap counts as 0. None where nothing is above 0."""
    series = [s for s in series if any(_known(y) and y for _, y in s.points)]
    if not series:
        return None
    steps = _buckets([x for x, _ in series[0].points])
    layers = [[sum(s.points[i][1] or 0.0 for i in bucket) / len(bucket) for bucket in steps] for s in series]
    xs = [series[0].points[bucket[0]][0] for bucket in steps]
    floors = [[0.0] * len(xs)]
    for layer in layers:
        floors.append([low + y for low, y in zip(floors[-1], layer, strict=True)])
    frame = _Frame(xs, [0.0, *floors[-1]], False)
    drawn = [frame.axes()]
    for n in range(len(series)):
        drawn.append(frame.area(xs, floors[n], floors[n + 1], n))
    named = [(s.name, list(zip(xs, layer, strict=True))) for s, layer in zip(series, layers, strict=True)]
    return _figure(title, note, named, frame, drawn, stacked=True)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from at or below ``low`` to at or above ``high``, at most about ``most``."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # a constant is seen against zero
        low, high = min(low, 0.0), max(high, 0.0) or (0.0 if low else 1.0)
    span = high - low
    raw = span / max(1, most - 1)
    exponent = math.floor(math.log10(raw))
    power = 10.0**exponent
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, max(12, 3 - exponent)) for i in range(first, max(last, first + 1) + 1)]


def short(value: float | None) -> str:
    """A number for an axis or a table: about four digits, thousands as ``k``."""
    if value is None or not math.isfinite(value):
        return "-"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if abs(value) >= 1e4:
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}"


class _Frame:
    """The plot's rectangle and its two scales."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], log: bool) -> None:
        self.log = log
        self.x0, self.x1 = min(xs), max(xs)
        if log:
            above = [y for y in ys if y > 0]
            first, last = math.floor(math.log10(min(above))), math.ceil(math.log10(max(above)))
            every = max(1, -(-(last - first) // 4))
            self.y_ticks = [10.0**e for e in range(first, max(last, first + 1) + every, every)]
        else:
            self.y_ticks = ticks(min(ys), max(ys))
        self.y0, self.y1 = self._up(self.y_ticks[0]), self._up(self.y_ticks[-1])

    def _up(self, y: float) -> float:
        return math.log10(max(y, self.y_ticks[0])) if self.log else y

    def x(self, x: float) -> float:
        share = 0.5 if self.x1 == self.x0 else (x - self.x0) / (self.x1 - self.x0)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, y: float) -> float:
        share = (self._up(y) - self.y0) / (self.y1 - self.y0)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def axes(self) -> str:
        parts = []
        for y in self.y_ticks:
            at = self.y(y)
            parts.append(f'<path class="rule" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{short(y)}</text>')
        for x in ticks(self.x0, self.x1, 6):
            if self.x0 <= x <= self.x1 and x == int(x):
                parts.append(f'<text x="{self.x(x)}" y="{HEIGHT - 6}" text-anchor="middle">{int(x)}</text>')
        return "".join(parts)

    def line(self, series: Series, colour: int) -> str:
        points = _thin(series.points)
        path, pen = [], "M"
        for x, y in points:
            if y is None or not _known(y):
                pen = "M"
                continue
            path.append(f"{pen}{self.x(x)} {self.y(y)}")
            pen = "L"
        known = [(x, y) for x, y in points if y is not None and _known(y)]
        dots = ""
        if series.style == "dots" or len(known) == 1:
            dots = "".join(f'<circle class="d{colour}" cx="{self.x(x)}" cy="{self.y(y)}" r="3"/>' for x, y in known)
        return f'<path class="l{colour} {series.style}" d="{"".join(path)}"/>{dots}'

    def band(self, series: Series, colour: int) -> str:
        edge = _edges(series)
        kept = [edge[bucket[0]] for bucket in _buckets(edge)]
        if len(kept) < 2:
            return ""
        return self.area(
            [x for x, _, _ in kept], [low for _, low, _ in kept], [high for _, _, high in kept], colour, "b"
        )

    def area(
        self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], colour: int, kind: str = "a"
    ) -> str:
        there = [f"{self.x(x)} {self.y(y)}" for x, y in zip(xs, high, strict=True)]
        back = [f"{self.x(x)} {self.y(y)}" for x, y in zip(reversed(xs), reversed(low), strict=True)]
        return f'<path class="{kind}{colour}" d="M{"L".join([*there, *back])}Z"/>'


def _figure(
    title: str,
    note: str,
    named: Sequence[tuple[str, Sequence[Point]]],
    frame: _Frame,
    drawn: list[str],
    over: str = "step",
    *,
    stacked: bool = False,
) -> Markup:
    """The drawing with what ``chart_script.html`` shows of it: values under the pointer or by arrow keys, and a table.
    To a screen reader it is a slider over the steps, whose text is the values."""
    legend = Markup("").join(
        Markup('<span class="key"><i class="k{}"></i>{}</span>').format(n, name) for n, (name, _) in enumerate(named)
    )
    thin = [(name, _thin(points)) for name, points in named]
    data = {
        "from": frame.x0,
        "to": frame.x1,
        "over": over,
        "y": [frame.y0, frame.y1],
        "log": frame.log,
        "stacked": stacked,
        "series": [[name, *map(list, zip(*points, strict=True))] for name, points in thin],
    }
    return Markup(
        '<figure class="chart" data-chart="{}"><figcaption><b>{}</b>{}<span class="keys">{}</span></figcaption>'
        '<svg viewBox="0 0 {} {}" tabindex="0" role="slider" aria-readonly="true" aria-label="{}" aria-valuemin="{}" '
        'aria-valuemax="{}" aria-valuenow="{}" aria-valuetext="{}">{}<path class="cursor" d=""/><g></g></svg>'
        '<output aria-hidden="true" hidden></output><details class="values"><summary>values</summary></details>'
        "</figure>"
    ).format(
        json.dumps(data),
        title,
        Markup(" <small>{}</small>").format(note) if note else "",
        legend if len(named) > 1 else "",
        WIDTH,
        HEIGHT,
        f"{title} by {over}",
        f"{frame.x0:g}",
        f"{frame.x1:g}",
        f"{frame.x1:g}",
        _last_values(thin, over),
        Markup("".join(drawn)),  # numbers and class names of this module only
    )


def _last_values(named: Sequence[tuple[str, Sequence[Point]]], over: str) -> str:
    """The last value of each series, in words."""
    last = [(name, [(x, y) for x, y in points if _known(y)][-1:]) for name, points in named]
    return ", ".join(f"{name} {short(y)} at {over} {x:g}" for name, found in last for x, y in found)


def _thin(points: Sequence[Point]) -> list[Point]:
    if len(points) <= POINTS:
        return list(points)
    kept = []
    for bucket in _buckets(points, POINTS // 2):
        known = [i for i in bucket if _known(points[i][1])]
        if not known:
            kept.append(points[bucket[0]])
            continue
        ends = {min(known, key=lambda i: points[i][1] or 0.0), max(known, key=lambda i: points[i][1] or 0.0)}
        kept += [points[i] for i in sorted(ends)]
    return kept


def _buckets(items: Sequence[object], most: int = POINTS // 2) -> list[range]:
    count = min(len(items), most)
    edges = [len(items) * i // count for i in range(count + 1)] if count else []
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def _reach(series: Series) -> list[float]:
    values = [y for _, y in series.points if y is not None and _known(y)]
    return [*values, *(end for _, low, high in _edges(series) for end in (low, high))]


def _edges(series: Series) -> list[tuple[float, float, float]]:
    """Step, low and high end of a line's band, where it has one."""
    both = zip(series.points, series.spread or [], strict=False)
    return [(x, y - s, y + s) for (x, y), s in both if y is not None and s is not None and _known(y) and _known(s)]


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
