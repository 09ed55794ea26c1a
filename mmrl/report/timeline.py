"""Draw the timeline of a run's devices from placement.jsonl: a few steps, and the decisions.

The file may be large. One pass finds the byte ranges of each step and the decisions; then only the steps that are shown
are parsed. A line that is not a record is counted and left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from markupsafe import Markup

from mmrl.core.json_types import JsonObject
from mmrl.core.lines import row_of
from mmrl.report.charts import short, ticks

ROLES = {
    "rollout": ("sampling", 0),
    "judge": ("judging", 1),
    "train": ("training", 2),
    "wake": ("changing roles or weights", 6),
    "call": ("rewards outside of the devices", 3),
}
"""By the role in the file: its name in the report and its colour."""
OTHER = 7
"""The colour of any other role."""
STEPS = 4
DEVICES = 32
DECISIONS = 12
"""Shown at most."""
_BARS = 400
"""Drawn of one device in one step; of more the longest."""
_NUMBERS = 12
_ROW, _BAR, _AXIS = 22, 16, 20
_STEP = re.compile(rb'\s*\{\s*"step"\s*:\s*(\d{1,15})\s*,')
_OUTSIDE = 10**6
Place = tuple[int, int]
"""Controller, and device of it; ``_OUTSIDE`` for its rewards that compute elsewhere."""
Split = tuple[int, int]
"""Devices of a controller that sample, and that judge while the others sample; 0 is colocate."""


@dataclass(frozen=True)
class Span:
    """One task of a device, in seconds from the start of its step; ``calls`` tasks are drawn as one. ``of``: its step,
    where that is another, and its round, where there are several."""

    role: str
    began: float
    ended: float
    calls: int = 1
    of: str = ""


@dataclass(frozen=True)
class Shown:
    """A step that is drawn: ``idle`` is the share of the time of all devices, those not drawn included."""

    step: int
    about: str
    seconds: float
    idle: float
    drawing: Markup


class Decision(TypedDict):
    """A row of the table of decisions. ``changed``: the split differs from the one before."""

    step: int
    split: str
    changed: bool
    why: str
    numbers: dict[str, float | None]


@dataclass(frozen=True)
class Timeline:
    """What the report shows. ``shares`` has a row for each device over the steps shown, all devices last: a name, and
    the share of time by role, ``idle`` among them. ``outside``: names of the rows below those of the devices."""

    steps: list[Shown]
    legend: list[tuple[str, str]]
    labels: list[str]
    outside: list[str]
    roles: list[str]
    shares: list[tuple[str, dict[str, float]]]
    hidden: int
    bad: int
    decisions: list[Decision]
    numbers: list[str]
    decided: int
    same_scale: bool


@dataclass
class _Index:
    """Where the lines of each step lie in the file (begin and end in bytes), and the decisions by step."""

    places: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    decisions: dict[int, JsonObject] = field(default_factory=dict)
    bad: int = 0


def timeline(path: Path, metrics: Sequence[JsonObject] = ()) -> Timeline | None:
    """The timeline of a run's placement.jsonl, or None where there is none or nothing in it can be drawn.

    ``metrics``: the run's rows, which know the split of steps that no decision came before.
    """
    try:
        index = _index(path)
    except OSError:
        return None
    splits = _splits(index, metrics)
    chosen = _choose(index, splits)
    work = {step: _read(path, index, step) for step in chosen}
    work = {step: found for step, found in work.items() if found}
    if not work:
        return None
    used_places = sorted({place for found in work.values() for place in found})
    places = [place for place in used_places if place[1] != _OUTSIDE]
    outside = [place for place in used_places if place[1] == _OUTSIDE][:DEVICES]
    lengths = {step: max(s.ended for spans in found.values() for s in spans) for step, found in work.items()}
    same_scale = max(lengths.values()) <= 3 * min(lengths.values())
    drawn = places[:DEVICES]
    several = len({controller for controller, _ in places}) > 1
    labels = [f"{c}.{d}" if several else f"device {d}" for c, d in drawn]
    elsewhere = [f"{c}.outside" if several else "outside" for c, _ in outside]
    steps = []
    for step, found in work.items():
        axis = max(lengths.values()) if same_scale else lengths[step]
        busy = sum(s.ended - s.began for place in places for s in found.get(place, ()))
        idle = max(0.0, 1 - busy / (lengths[step] * max(len(places), 1)))
        drawing = _draw(
            [found.get(place, []) for place in (*drawn, *outside)], labels + elsewhere, lengths[step], axis, step
        )
        steps.append(Shown(step, chosen[step], lengths[step], idle, drawing))
    used = dict.fromkeys(s.role for found in work.values() for spans in found.values() for s in spans)
    roles = [*(r for r in ROLES if r in used), *(r for r in used if r not in ROLES)]
    shares = [(label, _shares(work, lengths, [place])) for label, place in zip(labels, drawn, strict=True)]
    if len(places) > 1:
        shares.append((f"all {len(places)}", _shares(work, lengths, places)))
    decisions, numbers = _decisions(index, splits)
    return Timeline(
        steps=steps,
        legend=[(f"k{_colour(role)}", _name(role)) for role in roles],
        labels=labels,
        outside=elsewhere,
        roles=[*(_name(role) for role in roles if role != "call"), "idle"],
        shares=shares,
        hidden=len(places) - len(drawn),
        bad=index.bad,
        decisions=decisions,
        numbers=numbers,
        decided=len(index.decisions),
        same_scale=same_scale,
    )


def _index(path: Path) -> _Index:
    index, at = _Index(), 0
    with path.open("rb") as file:
        for line in file:
            begin, at = at, at + len(line)
            found = _STEP.match(line)
            if not line.endswith(b"\n") or not line.strip():  # torn, or the run is writing it
                continue
            if not found:
                index.bad += 1
                continue
            if b'"heard": ' in line:  # of the scheduler's log
                continue
            step = int(found[1])
            if b'"decision"' in line:
                row = row_of(line, strict=True)
                if row is not None and isinstance(row.get("decision"), str):
                    index.decisions[step] = row
                    continue
            spans = index.places[step]
            if spans and spans[-1][1] == begin:
                spans[-1] = (spans[-1][0], at)
            else:
                spans.append((begin, at))
    return index


def _read(path: Path, index: _Index, step: int) -> dict[Place, list[Span]]:
    """The tasks of each device in a step, by their start."""
    work: dict[Place, list[Span]] = defaultdict(list)
    with path.open("rb") as file:
        for begin, end in index.places[step]:
            file.seek(begin)
            for line in file.read(end - begin).splitlines():
                row = row_of(line, strict=True)
                found = None if row is None else _span(row)
                if found is None:
                    index.bad += 1
                else:
                    work[found[0]].append(found[1])
    return {place: sorted(spans, key=lambda s: s.began) for place, spans in work.items()}


def _span(row: JsonObject) -> tuple[Place, Span] | None:
    controller, device, role = row.get("controller"), row.get("device"), row.get("role")
    began, ended = row.get("began"), row.get("ended")
    device = _OUTSIDE if role == "call" else device
    if not isinstance(role, str) or not isinstance(controller, int) or not isinstance(device, int):
        return None
    if not isinstance(began, int | float) or not isinstance(ended, int | float):
        return None
    if not (0 <= controller < 10**6 and 0 <= device <= _OUTSIDE and 0 <= began <= ended < 1e9):
        return None
    step, number, reward = row.get("of"), row.get("round"), row.get("reward")
    of = f" for step {step}" if isinstance(step, int) and 0 <= step < 1e9 else ""
    of += f", round {number + 1}" if isinstance(number, int) and 0 < number < 1e6 else ""
    of = f" ({reward[:40]})" * (role == "call") + of if isinstance(reward, str) else of
    return (controller, device), Span(role[:40], float(began), float(ended), of=of)


def _splits(index: _Index, metrics: Iterable[JsonObject]) -> dict[int, Split]:
    """The split at the start of each step: from its metrics, or from the decision after the step before."""
    known: dict[int, Split] = {}
    for step, row in index.decisions.items():
        if (split := _split(row.get("rollout"), row.get("judge"))) is not None:
            known[step + 1] = split
    for row in metrics:
        split = _split(row.get("placement/rollout_devices"), row.get("placement/judge_devices"))
        apart = "sampling/stale_steps" in row  # other devices train, so none samples and judges in turn
        step = row.get("step")
        if split is not None and isinstance(step, int) and (split[1] or not apart):
            known[step] = split
    return known


def _split(rollout: object, judge: object) -> Split | None:
    if isinstance(rollout, int | float) and isinstance(judge, int | float) and 0 <= rollout < 1e6 and 0 <= judge < 1e6:
        return int(rollout), int(judge)
    return None


def _choose(index: _Index, splits: Mapping[int, Split]) -> dict[int, str]:
    """The steps to show, in order, with a title: the first, those before and after the largest change of the split, and
    the last."""
    steps = sorted(index.places)
    if not steps:
        return {}
    changed = [n for n in steps if n - 1 in index.places and _differ(splits, n - 1, n)]
    about = {steps[0]: "the first"}
    if changed:
        largest = max(changed, key=lambda n: abs(splits[n][1] - splits[n - 1][1]))
        about.setdefault(largest - 1, "before the split changed")
        about.setdefault(largest, "after the split changed")
    elif len(steps) > 2:
        about.setdefault(steps[len(steps) // 2], "half way")
    about.setdefault(steps[-1], "the last")
    named = {step: f": {split_name(split)}" for step, split in splits.items()}
    return {step: about[step] + named.get(step, "") for step in sorted(about)[:STEPS]}


def _differ(splits: Mapping[int, Split], a: int, b: int) -> bool:
    return a in splits and b in splits and splits[a] != splits[b]


def split_name(split: Split) -> str:
    """``2 sampling + 1 judging``, or ``all 3 in turn`` where every device does both."""
    return f"{split[0]} sampling + {split[1]} judging" if split[1] else f"all {split[0]} in turn"


def _shares(
    work: Mapping[int, Mapping[Place, list[Span]]], lengths: Mapping[int, float], of: Sequence[Place]
) -> dict[str, float]:
    """By role, idle among them: shares of the steps' time over some devices."""
    total = sum(lengths.values()) * len(of)
    seconds: dict[str, float] = defaultdict(float)
    for found in work.values():
        for place in of:
            for span in found.get(place, ()):
                seconds[_name(span.role)] += span.ended - span.began
    shares = {name: value / total if total else 0.0 for name, value in seconds.items()}
    return {**shares, "idle": max(0.0, 1 - sum(shares.values()))}


def _draw(rows: Sequence[Sequence[Span]], labels: Sequence[str], length: float, axis: float, step: int) -> Markup:
    """A row for each device. Widths are shares of the drawing's, so that text keeps its size on a narrow screen."""
    axis = axis or 1.0
    height = _ROW * len(rows)
    parts = []
    for at in ticks(0.0, axis, 5):
        if at <= axis * 1.0001:
            x = _percent(at / axis)
            anchor = "start" if at == 0 else "end" if at > 0.9 * axis else "middle"
            parts.append(f'<line class="rule" x1="{x}" x2="{x}" y1="0" y2="{height + 3}"/>')
            said = f"{short(at)} s" if at else "0"
            parts.append(f'<text x="{x}" y="{height + 15}" text-anchor="{anchor}">{said}</text>')
    for n, (label, spans) in enumerate(zip(labels, rows, strict=True)):
        y = n * _ROW + (_ROW - _BAR) // 2
        busy = sum(s.ended - s.began for s in spans)
        idle = f"{label}: idle {max(0.0, 1 - busy / (length or 1.0)):.0%} of the step"
        if any(span.role == "call" for span in spans):  # which may overlap
            idle = f"{label}: no reward computes"
        parts.append(
            f'<rect class="idle" x="0" y="{y}" width="{_percent(length / axis)}" height="{_BAR}">'
            f"<title>{idle}</title></rect>"
        )
        for span in _joined(spans, axis):
            said = Markup("{}: {}{}{}, {} s to {} s").format(
                label,
                _name(span.role),
                span.of,
                f", {span.calls} calls" if span.calls > 1 else "",
                short(round(span.began, 3)),
                short(round(span.ended, 3)),
            )
            width = _percent(max(span.ended - span.began, 0.001 * axis) / axis)
            parts.append(
                f'<rect class="a{_colour(span.role)}" x="{_percent(span.began / axis)}" y="{y}" width="{width}" '
                f'height="{_BAR}"><title>{said}</title></rect>'
            )
    said = f"what {len(rows)} devices did in step {step}"
    return Markup('<svg class="rows" height="{}" role="img" aria-label="{}">{}</svg>').format(
        height + _AXIS, said, Markup("".join(parts))
    )


def _joined(spans: Sequence[Span], axis: float) -> Iterator[Span]:
    """The spans, with those too narrow to see joined, and at most ``_BARS``."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        narrow = last is not None and min(span.ended - span.began, last.ended - last.began) < 0.004 * axis
        same = last is not None and (last.role, last.of) == (span.role, span.of)
        if last is not None and narrow and same and span.began - last.ended < 0.001 * axis:
            joined[-1] = Span(span.role, last.began, max(last.ended, span.ended), last.calls + span.calls, span.of)
        else:
            joined.append(span)
    if len(joined) > _BARS:
        longest = sorted(joined, key=lambda s: s.began - s.ended)[:_BARS]
        joined = sorted(longest, key=lambda s: s.began)
    yield from joined


def _decisions(index: _Index, splits: Mapping[int, Split]) -> tuple[list[Decision], list[str]]:
    """Rows of the table and the names of its numbers: all decisions, or the first, those that changed the split (the
    latest of them) and the last."""
    steps = sorted(index.decisions)
    if len(steps) > DECISIONS:
        changed = [n for n in steps[1:-1] if _differ(splits, n, n + 1)]
        steps = [steps[0], *changed[-(DECISIONS - 2) :], steps[-1]]
    rows: list[Decision] = []
    for step in steps:
        row = index.decisions[step]
        numbers = row.get("numbers")
        split = _split(row.get("rollout"), row.get("judge"))
        rows.append(
            {
                "step": step,
                "split": split_name(split) if split else "-",
                "changed": _differ(splits, step, step + 1),
                "why": str(row["decision"])[:400],
                "numbers": {str(k): _number(v) for k, v in numbers.items()} if isinstance(numbers, dict) else {},
            }
        )
    return rows, list(dict.fromkeys(name for row in rows for name in row["numbers"]))[:_NUMBERS]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e15 else None  # not of a NaN


def _name(role: str) -> str:
    return ROLES[role][0] if role in ROLES else role


def _colour(role: str) -> int:
    return ROLES[role][1] if role in ROLES else OTHER


def _percent(share: float) -> str:
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"
