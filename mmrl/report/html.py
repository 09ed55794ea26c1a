"""One self-contained HTML file that shows a run, in progress or finished, also if parts are missing.

It loads nothing (a content policy in the page forbids it). All text is escaped: prompts, metric names and error
messages may come from anyone.

The sweep of ``mmrl eval --lora-strength`` has a curve per reward, and the grid of its pictures.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from mmrl.core.durations import duration
from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.grouping import grouped
from mmrl.core.json_types import elements
from mmrl.core.secrets import hidden
from mmrl.core.stored import read_object
from mmrl.logging.metrics import describe
from mmrl.logging.pictures import extremes, pairs
from mmrl.logging.rundir import RunDir
from mmrl.report.charts import LINES, Series, line_chart, short, stacked_chart
from mmrl.report.curve import curve_png
from mmrl.report.heldout import Samples, change_of, read_samples
from mmrl.report.recorded import RecordedRun, Row, flat, read_run
from mmrl.report.timeline import timeline
from mmrl.report.transcripts import transcripts
from mmrl.report.verdict import Judgement, judgement

__all__ = ["curve_png", "write_report"]

PHASES = ("encode", "sample", "decode", "reward", "prepare", "train")
_RECENT = 10
"""Steps averaged for a "now" of the training columns."""


def write_report(run: Path | str, judged: Judgement | None = None) -> Path:
    """Write ``report.html`` into the run directory and return its path. ``judged``: what is known of it already.

    Raises ``UserError`` where the directory is no run or a file in it cannot be read.
    """
    target = RunDir(run).report
    write_atomic(target, page_of(Path(run), judged))
    return target


def page_of(run: Path, judged: Judgement | None = None, follows: str | None = None) -> str:
    """The report as HTML, without secrets. ``follows``: the version of what it shows, of a page that asks its server
    for later ones. Raises ``UserError`` as ``write_report``."""
    found = read_run(run)
    before_after, samples = pairs(found.evaluations), read_samples(found.path)
    html = template("template.html").render(
        name=found.resolved.get("name") or found.path.resolve().name,
        head=head_of(found),
        judged=judged or judgement(found, samples),
        remarks=_remarks(found),
        heldout_charts=_heldout_charts(found),
        training_charts=_training_charts(found),
        devices=timeline(RunDir(run).placement, found.metrics),
        pairs=before_after,
        table=_reward_table(found, samples),
        extremes=extremes(found.evaluations, found.trained),
        strength=read_sweep(found.path, found.labels, found.trained),
        judges=transcripts(found.path),
        failures=_failures(found),
        config=_config(found),
        overrides=found.overrides,
        env=flat(found.env),
        metrics=_last_values(found),
        follows=follows,
    )
    return hidden(html)


def template(name: str) -> Template:
    """A page of this folder; everything that is put into it is escaped."""
    return _pages().get_template(name)


@cache
def _pages() -> Environment:
    """The pages of this folder. Each is compiled once: a run writes its report after every evaluation."""
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["short"] = short
    return pages


def head_of(run: RecordedRun) -> dict[str, Any]:
    """The status and the main numbers (``tiles``) at the top of the report."""
    total, budget = run.setting("train.steps"), run.setting("train.max_cpu_seconds")
    last = run.metrics[-1] if run.metrics else {}
    step, cpu = last.get("step", 0), last.get("perf/cpu_seconds")
    times = [value for _, value in run.column("time/step") if value is not None]
    tiles = [("steps", f"{step}/{total}" if total else str(step), "")]
    if cpu is not None:
        tiles.append(("CPU seconds of training", f"{cpu:,.0f}", f"of {budget:,.0f}" if budget else ""))
    if times:
        tiles.append(("wall time of training", duration(sum(times)), f"{short(sum(times) / len(times))} s a step"))
    if (times_planned := run.over_plan()) is not None:
        tiles.append(("a step, of its planned time", f"{times_planned:.2f} x", "mmrl doctor --calibrate: nearer to 1"))
    if run.heldout:
        first, now = run.heldout[0], run.heldout[-1]
        for key, label, note in run.measured:
            a, b = first.get(key), now.get(key)
            if a is not None and b is not None and key not in ("dpo/chosen_reward", "dpo/rejected_reward"):
                detail = f"from {short(round(a, 4))} ({_signed(b - a)})"
                tiles.append((f"held-out {label}{f' ({note})' if note else ''}", short(round(b, 4)), detail))
    written = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    samples = run.heldout[-1].get("samples") if run.heldout else None
    return {"status": run.status, "tiles": tiles, "written": written, "samples": samples}


def _remarks(run: RecordedRun) -> list[str]:
    """Remarks and warnings at the top of the report."""
    bad = grouped((str(key), row["step"]) for row in run.metrics for key in row.get("nonfinite") or [])
    found = [*_continued(run)]
    found += [f"{key} was not finite in {_steps(steps)}." for key, steps in bad.items()]
    if run.failures:
        count = len(run.failures)
        found.append(f"{count} {'thing was' if count == 1 else 'things were'} left out; see Failures.")
    return found


def _continued(run: RecordedRun) -> Iterator[str]:
    """What ``mmrl continue`` changed, each time."""
    for row in run.continued:
        notes, changes = row.get("notes"), _listed(row.get("changes"))
        said = [f"{of.get('key')} {json.dumps(of.get('before'))} → {json.dumps(of.get('now'))}" for of in changes]
        said += map(str, elements(notes))
        yield f"Continued after step {row.get('after')}: {'; '.join(said)}."


def _listed(found: Any) -> list[dict[str, Any]]:
    return [of for of in elements(found) if isinstance(of, dict)]


def _heldout_charts(run: RecordedRun) -> list[Markup]:
    charts = []
    for key, label, note in run.measured:
        held = Series("held-out", [(row["step"], row.get(key)) for row in run.heldout], "dots")
        training = Series("training samples", run.column(key), "faint")
        charts.append(line_chart(label, [held, training], note=note))
        parts = sorted({k for row in run.heldout for k in row if k.startswith(f"{key}/")})
        lines = [Series(k.removeprefix(f"{key}/"), [(r["step"], r.get(k)) for r in run.heldout], "dots") for k in parts]
        charts.append(line_chart(f"{label}: parts", lines, note="held-out"))
    return [chart for chart in [*charts, *_guard_charts(run)] if chart is not None]


def _guard_charts(run: RecordedRun) -> Iterator[Any]:
    """What shows over-optimisation (docs/reward_hacking.md)."""
    notes = {"diversity": "of a prompt's held-out samples", "distance": "of held-out samples to the base model's"}
    for name, note in notes.items():
        held = Series("held-out", [(row["step"], row.get(f"guard/{name}")) for row in run.heldout], "dots")
        yield line_chart(name, [held], note=note)
    changes = sorted({key for row in run.heldout for key in row if key.startswith("guard/change/")})
    labels = {key: key.removeprefix("guard/change/") for key in changes}
    named = {key: label if label in run.trained else f"{label} (not trained on)" for key, label in labels.items()}
    lines = [Series(named[key], [(row["step"], row.get(key)) for row in run.heldout], "dots") for key in changes]
    yield line_chart("change of rewards", lines, note="standard deviations of the base model's scores")


def _training_charts(run: RecordedRun) -> list[Markup]:
    def faint(title: str, note: str, above: Mapping[str, str], below: Mapping[str, str]) -> Markup | None:
        """A faint line over the one that matters, on a logarithmic axis."""
        lines = [Series(name, run.column(key), "faint") for name, key in above.items()]
        lines += [Series(name, run.column(key)) for name, key in below.items()]
        return line_chart(title, lines, log=True, note=note)

    spread = [value for _, value in run.column("reward/std")]
    timed = {key.removeprefix("time/") for row in run.metrics for key in row if key.startswith("time/")}
    phases = [*PHASES, *sorted(timed - {*PHASES, "step", "environment"})]
    charts = [
        line_chart("reward", [Series("mean", run.column("reward/mean"), spread=spread)], note="weighted, mean ± std"),
        faint(
            "ratio deviation",
            "max |ratio - 1|",
            {"all updates": "policy/ratio_max_dev"},
            {"before the first": "policy/first_ratio_max_dev"},
        ),
        faint(
            "sampler against trainer",
            "|log-prob difference| per token",
            {"largest": "mismatch/log_prob_gap_max"},
            {"mean": "mismatch/log_prob_gap"},
        ),
        *(line_chart(title, [Series(n, run.column(k)) for n, k in lines], note=note) for title, note, lines in LINES),
        stacked_chart("time per phase", [Series(p, run.column(f"time/{p}")) for p in phases], note="seconds a step"),
    ]
    return [chart for chart in charts if chart is not None]


def _reward_table(run: RecordedRun, samples: Samples) -> list[dict[str, Any]]:
    """A row per figure of pairs, reward and part: training and held-out, at first and now."""
    keys = {key for row in [*run.metrics[-1:], *run.heldout[-1:]] for key in row}
    table = []
    for own, label, _ in run.measured:
        for key in sorted(k for k in keys if k == own or k.startswith(f"{own}/")):
            training = [value for _, value in run.column(key) if value is not None]
            held = [row[key] for row in run.heldout if row.get(key) is not None]
            changed = change_of(run, samples, key)
            table.append(
                {
                    "name": label if key == own else key.removeprefix(f"{own}/"),
                    "part": key != own,
                    "weight": run.trained.get(label) if key == own else None,
                    "training": (fmean(training[:_RECENT]), fmean(training[-_RECENT:])) if training else None,
                    "heldout": (held[0], held[-1], _signed(held[-1] - held[0])) if held else None,
                    "interval": "" if changed is None else changed.bounds(changed.half),
                }
            )
    return table


def _failures(run: RecordedRun) -> list[dict[str, Any]]:
    """Failures counted by kind, name and first line of the error, most frequent first."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in run.failures:
        error = str(row.get("error") or row.get("reason") or "").strip()
        key = (str(row.get("kind", "")), str(row.get("reward") or row.get("name") or ""), error.split("\n")[0][:300])
        groups.setdefault(key, []).append(row)
    named = [
        {
            "kind": kind,
            "name": name,
            "error": error,
            "count": len(rows),
            "steps": _steps([row["step"] for row in rows if isinstance(row.get("step"), int)]),
            "examples": list(dict.fromkeys(_example(row) for row in rows if _example(row)))[:3],
        }
        for (kind, name, error), rows in groups.items()
    ]
    return sorted(named, key=lambda group: -group["count"])


def _example(row: Row) -> str:
    """The prompt of a failed sample; its name, where the row has a reward."""
    return str(row.get("prompt") or (row.get("name", "") if "reward" in row else ""))[:200]


def _config(run: RecordedRun) -> list[dict[str, Any]]:
    """Every setting with where it came from: the command line, the recipe, or a default."""

    continued = {str(of.get("key")) for row in run.continued for of in _listed(row.get("changes"))}

    def source(key: str) -> str:
        if key in continued:
            return "mmrl continue"
        if any(key == k or key.startswith((f"{k}.", f"{k}[")) for k in run.overridden):
            return "command line"
        return "recipe" if key in run.given else "default"

    return [{"key": k, "value": json.dumps(v, ensure_ascii=False), "source": source(k)} for k, v in flat(run.resolved)]


def _last_values(run: RecordedRun) -> list[dict[str, Any]]:
    last = run.metrics[-1] if run.metrics else {}
    names = [key for key in sorted(last) if key not in ("step", "nonfinite")]
    return [{"key": key, "value": short(last[key]), "about": describe(key) or ""} for key in names]


def _steps(steps: list[int]) -> str:
    if len(steps) <= 1:
        return f"step {steps[0]}" if steps else "no step"
    return (
        f"{len(steps)} steps ({min(steps)} to {max(steps)})"
        if len(set(steps)) > 3
        else ("steps " + ", ".join(map(str, sorted(set(steps)))))
    )


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{short(round(abs(value), 4))}"


def read_sweep(run: Path, labels: Sequence[str], trained: Collection[str]) -> dict[str, Any] | None:
    """What the run directory ``run`` has of it; None where there was none. ``labels``: the rewards, and which of them
    are ``trained`` on. Raises ``UserError`` for a file that cannot be read."""
    file = run / "strength" / "sweep.json"
    try:
        found = read_object(file)
        rows = [{str(k): float(v) for k, v in row.items()} for row in found["rows"]]
        texts = [(str(one["strength"]), str(one["prompt"]), str(one["text"])) for one in found["texts"]]
        step = int(found["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} cannot be read ({error}); remove it, or run mmrl eval --lora-strength again"
        ) from error
    names = {f"reward/{x}": f"{x}{'' if x in trained else ' (not trained on)'}" for x in labels}
    names |= {f"guard/{x}": x for x in ("diversity", "distance")}
    charts = []
    for key, name in names.items():
        curve = Series("held-out", [(row["strength"], row.get(key)) for row in rows], "dots")
        charts.append(line_chart(name, [curve], note="by strength", over="strength"))
    picture = file.with_name("grid.png")
    source = f"data:image/png;base64,{b64encode(picture.read_bytes()).decode()}" if picture.is_file() else None
    return {"step": step, "charts": [chart for chart in charts if chart is not None], "grid": source, "texts": texts}
