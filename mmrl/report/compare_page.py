"""The comparison of runs as one self-contained HTML file, and as lines for the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.json_types import Json
from mmrl.core.secrets import hidden
from mmrl.logging.pictures import side_by_side
from mmrl.report.charts import Series, line_chart
from mmrl.report.compare import Comparison, Difference, Group, difference
from mmrl.report.heldout import label_in, number, signed
from mmrl.report.html import template
from mmrl.report.verdict import name_of

PROMPTS = 12
"""Held-out prompts that are shown side by side."""
_NUMBER = re.compile(r"(-?\d+)(?:\.\d+)?")
_WORDS = {"higher": "is higher than", "lower": "is lower than"}


def write_comparison(found: Comparison, out: Path, *, flag: str = "--out") -> Path:
    """Write the page to the file ``out`` and return it; ``flag``: how the caller gives it. Raises ``UserError`` where
    that cannot be written."""
    html = template("compare.html").render(
        title=f"Held-out {name_of(found.measure)}",
        measure=found.measure,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        sentences=list(sentences(found)),
        rows=rows(found),
        apart=apart,
        charts=_charts(found),
        settings={key: [shown(value) for value in values] for key, values in found.settings.items()},
        labels=[group.label for group in found.groups],
        pairs=_side_by_side(found),
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, hidden(html))
    except OSError as error:
        raise UserError(f"cannot write {out} ({error.strerror or error}); give another file with {flag}") from error
    return out


def rows(found: Comparison) -> list[dict[str, str]]:
    """The cells of a line per group: label, run, seeds, steps, before, after, interval, against the first."""
    return [_row(found, group) for group in found.groups]


def apart(text: str, first: str) -> tuple[str, str]:
    """The number ``text`` in two parts, of which the second begins where its digits differ from those of ``first``:
    ``0.43`` and ``81`` beside ``0.4375``. That part is empty where what both show is the same, and of other words."""
    mine, others = _NUMBER.fullmatch(text), _NUMBER.fullmatch(first)
    if mine is None or others is None:
        return text, ""
    if len(mine[1]) != len(others[1]):  # digits of one place stand below each other no more
        return "", text
    for n, (here, there) in enumerate(zip(text, first, strict=False)):
        if here != there:
            return text[:n], text[n:]
    return text, ""


def sentences(found: Comparison) -> Iterator[str]:
    """What can be said of each group against the first, and what its interval is over."""
    first = found.groups[0]
    yield from _other_rewards(found)
    for group in found.groups[1:]:
        differs = difference(first, group, found.measure)
        if not differs.known:
            why = "too few prompts differ" if differs.count else "a run kept no figures of single samples"
            near = differs.value
            yield f"{group.label} against {first.label}: {signed(differs.value, near)}, without an interval: {why}."
        elif differs.verdict == "unclear":
            yield (
                f"{group.label} and {first.label} do not differ significantly: {_against(differs)} over "
                f"{differs.count} {differs.over}."
            )
        else:
            above = f"{group.label} {_WORDS[differs.verdict]} {first.label}"
            yield f"{above}: {_against(differs)} over {differs.count} {differs.over}."
    if any(len(group.runs) == 1 for group in found.groups):
        yield "An interval over prompts says nothing of other seeds; train each setting with three seeds or more."


def _other_rewards(found: Comparison) -> Iterator[str]:
    """That groups have other rewards of the measure's name, such as a judge with another rubric."""
    label = label_in(found.measure)
    if label is None:
        return
    first, *others = [(group.label, group.runs[0].reward(label)) for group in found.groups]
    if differ := [name for name, reward in others if first[1] and reward and reward != first[1]]:
        yield (
            f"Not the same measure: {label} has other options in {' and '.join(differ)} than in {first[0]}, so a "
            "difference may be one of the rewards, not of the models. Choose a measure that is the same in all."
        )


def shown(value: Json) -> str:
    """A setting as the recipe has it."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _row(found: Comparison, group: Group) -> dict[str, str]:
    final, differs = group.final(found.measure), found.difference(group)
    near = final.half
    before = group.at(0, found.measure)
    steps = sorted({run.heldout[-1]["step"] for run in group.runs})
    more = f" +{len(group.runs) - 1}" if len(group.runs) > 1 else ""
    return {
        "label": group.label,
        "run": group.name + more,
        "seeds": ", ".join(map(str, group.seeds)),
        "steps": f"{steps[0]:g}" if len(steps) == 1 else f"{steps[0]:g} to {steps[-1]:g}",
        "before": number(sum(before) / len(before), near),
        "after": number(final.value, near),
        "interval": final.bounds(near),
        "against": "" if differs is None else _against(differs),
    }


def _against(differs: Difference) -> str:
    """``+0.05 (-0.02 to 0.11)``."""
    if not differs.known:
        return signed(differs.value, differs.value)
    near = differs.half or differs.value
    return f"{signed(differs.value, near)} ({differs.bounds(near)})"


def _charts(found: Comparison) -> list[Markup]:
    """Curves of the measure, and of every other reward that all runs measure."""
    figures = [{key for row in run.heldout for key in row} for group in found.groups for run in group.runs]
    shared = set.intersection(*figures)
    rewards = sorted(key for key in shared if key.startswith("reward/") and key.count("/") == 1)
    guards = [key for key in ("guard/diversity", "guard/distance") if key in shared]
    band = any(len(group.runs) > 1 for group in found.groups)
    charts = []
    for key in dict.fromkeys([found.measure, *rewards, *guards]):
        lines = []
        for group in found.groups:
            points = group.curve(key)
            spread = [std for *_, std in points] if len(group.runs) > 1 else None
            name = f"{group.label} {group.name}"
            lines.append(Series(name, [(step, mean) for step, mean, _ in points], "dots", spread))
        note = f"{key}, held-out" + (", mean ± standard deviation over seeds" if band else "")
        charts.append(line_chart(name_of(key).removeprefix("guard/"), lines, note=note))
    return [chart for chart in charts if chart is not None]


def _side_by_side(found: Comparison) -> dict[str, Any] | None:
    """The prompts that all runs kept samples of: before training, and after it in the first run of each group."""
    firsts = [group.runs[0] for group in found.groups]
    if not all(run.evaluations for run in firsts):
        return None
    base = [e for e in firsts[0].evaluations[:1] if e.step == 0 and len(firsts[0].evaluations) > 1]
    last = [run.evaluations[-1] for run in firsts]
    cells = side_by_side([*base, *last], PROMPTS)
    if cells is None:
        return None
    names = [f"{group.label}, step {e.step}" for group, e in zip(found.groups, last, strict=True)]
    return {**cells, "titles": [*("before training" for _ in base), *names]}
