"""One self-contained HTML file that shows a run, in progress or finished, also if parts are missing.

It loads nothing (a content policy in the page forbids it). All text is escaped: prompts, metric names and error
messages may come from anyone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mmrl.config.evaluation_checks import label_of
from mmrl.errors import UserError
from mmrl.files import write_atomic
from mmrl.json_types import Json, JsonObject
from mmrl.report.charts import LINES, Series, line_chart, short, stacked_chart
from mmrl.report.curve import curve_png
from mmrl.report.durations import duration
from mmrl.report.metrics import describe, of_pairs, of_repeated, of_source, read
from mmrl.report.pictures import Evaluation, extremes, pairs, read_evaluations
from mmrl.report.rundir import RunDir, looks_like_run
from mmrl.report.strengths import read_sweep
from mmrl.report.timeline import timeline
from mmrl.report.transcripts import transcripts
from mmrl.secrets import hidden

__all__ = ["curve_png", "write_report"]

PHASES = ("encode", "sample", "decode", "reward", "prepare", "train")
_RESERVED = ("mean", "std", "dropped")
"""Metrics of the sum of all rewards; anything else after ``reward/`` is a label."""
_RECENT = 10
"""Steps averaged for a "now" of the training columns."""
Row = dict[str, Any]


@dataclass
class _Run:
    """The content of a run directory; missing files are empty."""

    path: Path
    metrics: list[Row]
    heldout: list[Row]
    failures: list[Row]
    resolved: dict[str, Any]
    given: set[str]
    overridden: set[str]
    overrides: list[str]
    env: JsonObject
    owner: JsonObject | None
    evaluations: list[Evaluation]

    @property
    def trained(self) -> dict[str, float]:
        """Weight by label of the rewards that are trained on."""
        found = self.resolved.get("rewards")
        rewards = found if isinstance(found, list) else []
        return {_label(r): float(r.get("weight", 1.0)) for r in rewards if isinstance(r, dict)}

    @property
    def labels(self) -> list[str]:
        """Every reward seen, those trained on first."""
        seen = [
            k.split("/")[1] for row in [*self.heldout[-1:], *self.metrics[-1:]] for k in row if k.startswith("reward/")
        ]
        known = [label for label in [*self.trained, *seen] if label in seen]
        return [label for label in dict.fromkeys(known) if label not in _RESERVED]

    @property
    def measured(self) -> list[tuple[str, str, str]]:
        """(key, name, remark) of each figure of an evaluation: those of given pairs, and every reward."""
        seen = dict.fromkeys(key for row in [*self.heldout[-1:], *self.metrics[-1:]] for key in row)
        watched = "not trained on" if self.resolved else ""
        rewards = [(f"reward/{x}", x, "" if x in self.trained else watched) for x in self.labels]
        apart = [(key, f"{parts[1]}: {parts[-1]}", "one source") for key in seen if len(parts := of_source(key)) == 4]
        repeated = [(key, key, "held-out") for key in of_repeated(seen)]
        return [*((key, key, "") for key in of_pairs(seen)), *rewards, *repeated, *apart]

    def column(self, key: str) -> list[tuple[float, float | None]]:
        """(step, value) of a metric in training."""
        return [(row["step"], row.get(key)) for row in self.metrics]


def write_report(run: Path | str) -> Path:
    """Write ``report.html`` into the run directory and return its path.

    Raises ``UserError`` where the directory is no run or a file in it cannot be read.
    """
    from jinja2 import Environment, StrictUndefined

    found = _read(Path(run))
    source = Path(__file__).with_name("template.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters["short"] = short
    before_after = pairs(found.evaluations)
    html = page.from_string(source).render(
        name=found.resolved.get("name") or found.path.resolve().name,
        head=_head(found),
        remarks=_remarks(found),
        heldout_charts=_heldout_charts(found),
        training_charts=_training_charts(found),
        devices=timeline(RunDir(run).placement, found.metrics),
        pairs=before_after,
        table=_reward_table(found),
        extremes=extremes(found.evaluations, found.trained),
        strength=read_sweep(found.path, found.labels, found.trained),
        judges=transcripts(found.path),
        failures=_failures(found),
        config=_config(found),
        overrides=found.overrides,
        env=_flat(found.env),
        metrics=_last_values(found),
    )
    target = RunDir(run).report
    write_atomic(target, hidden(html))
    return target


def _read(path: Path) -> _Run:
    run = RunDir(path)
    if not (looks_like_run(path) or run.metrics.is_file() or run.heldout.is_file()):
        raise UserError(f"there is no run in {path}; name a directory that mmrl train made (it holds metrics.jsonl)")
    overrides = run.overrides()
    return _Run(
        path=path,
        metrics=_rows(run.metrics),
        heldout=_rows(run.heldout),
        failures=read(run.failures),
        resolved=_json(run.resolved),
        given=_given(run.recipe),
        overridden={text.partition("=")[0].strip() for text in overrides},
        overrides=overrides,
        env=_json(run.env),
        owner=run.owner(),
        evaluations=read_evaluations(run.samples),
    )


def _rows(path: Path) -> list[Row]:
    """The rows by step, the last one of each step, numbers only (others and non-finite ones are None)."""
    by_step = {}
    for row in read(path):
        if isinstance(row.get("step"), int):
            by_step[row["step"]] = {k: v if k == "nonfinite" else _finite(v) for k, v in row.items()}
    return [by_step[step] for step in sorted(by_step)]


def _finite(value: object) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); mend or remove it") from error
    return found if isinstance(found, dict) else {}


def _given(recipe: Path) -> set[str]:
    """The keys that the recipe itself sets, dotted."""
    import yaml

    try:
        documents = list(yaml.safe_load_all(recipe.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError):
        return set()
    return {key for document in documents if isinstance(document, dict) for key, _ in _flat(document)}


def _flat(tree: Json, prefix: str = "") -> list[tuple[str, Json]]:
    """Leaves of nested mappings and lists of mappings as (``a.b[0].c``, value)."""
    if isinstance(tree, Mapping) and tree:
        return [leaf for key, value in tree.items() for leaf in _flat(value, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        return [leaf for i, value in enumerate(tree) for leaf in _flat(value, f"{prefix}[{i}]")]
    return [(prefix, tree)]


def _label(reward: Mapping[str, Any]) -> str:
    return label_of(str(reward.get("name", "")), reward.get("label"))


def _head(run: _Run) -> dict[str, Any]:
    """The status and the main numbers at the top of the report."""
    train = run.resolved.get("train")
    train = train if isinstance(train, dict) else {}
    total, budget = train.get("steps"), train.get("max_cpu_seconds")
    last = run.metrics[-1] if run.metrics else {}
    step, cpu = last.get("step", 0), last.get("perf/cpu_seconds")
    times = [value for _, value in run.column("time/step") if value is not None]
    if total and step >= total:  # also while the run still holds its lock, to write this
        status = "finished"
    elif budget and cpu and cpu >= budget:
        status = "finished (CPU budget spent)"
    elif run.owner:
        status = "running"
    else:
        status = "stopped" if run.metrics else "not started"
    tiles = [("steps", f"{step}/{total}" if total else str(step), "")]
    if cpu is not None:
        tiles.append(("CPU seconds of training", f"{cpu:,.0f}", f"of {budget:,.0f}" if budget else ""))
    if times:
        tiles.append(("wall time of training", duration(sum(times)), f"{short(sum(times) / len(times))} s a step"))
    if run.heldout:
        first, now = run.heldout[0], run.heldout[-1]
        for key, label, note in run.measured:
            a, b = first.get(key), now.get(key)
            if a is not None and b is not None and key not in ("dpo/chosen_reward", "dpo/rejected_reward"):
                detail = f"from {short(round(a, 4))} ({_signed(b - a)})"
                tiles.append((f"held-out {label}{f' ({note})' if note else ''}", short(round(b, 4)), detail))
    written = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return {"status": status, "tiles": tiles, "written": written, "samples": _samples(run)}


def _samples(run: _Run) -> int | None:
    return run.heldout[-1].get("samples") if run.heldout else None


def _remarks(run: _Run) -> list[str]:
    """Warnings at the top of the report."""
    bad: dict[str, list[int]] = {}
    for row in run.metrics:
        for key in row.get("nonfinite") or []:
            bad.setdefault(str(key), []).append(row["step"])
    found = [f"{key} was not finite in {_steps(steps)}." for key, steps in bad.items()]
    if run.failures:
        count = len(run.failures)
        found.append(f"{count} {'thing was' if count == 1 else 'things were'} left out; see Failures.")
    if not run.heldout:
        found.append("No held-out evaluation yet.")
    return found


def _heldout_charts(run: _Run) -> list[Markup]:
    charts = []
    for key, label, note in run.measured:
        held = Series("held-out", [(row["step"], row.get(key)) for row in run.heldout], "dots")
        training = Series("training samples", run.column(key), "faint")
        charts.append(line_chart(label, [held, training], note=note))
        parts = sorted({k for row in run.heldout for k in row if k.startswith(f"{key}/")})
        lines = [Series(k.removeprefix(f"{key}/"), [(r["step"], r.get(k)) for r in run.heldout], "dots") for k in parts]
        charts.append(line_chart(f"{label}: parts", lines, note="held-out"))
    return [chart for chart in [*charts, *_guard_charts(run)] if chart is not None]


def _guard_charts(run: _Run) -> Iterator[Any]:
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


def _training_charts(run: _Run) -> list[Markup]:
    def faint(title: str, note: str, above: Mapping[str, str], below: Mapping[str, str]) -> Markup | None:
        """A faint line over the one that matters, on a logarithmic axis."""
        lines = [Series(name, run.column(key), "faint") for name, key in above.items()]
        lines += [Series(name, run.column(key)) for name, key in below.items()]
        return line_chart(title, lines, log=True, note=note)

    spread = [value for _, value in run.column("reward/std")]
    phases = [*PHASES, *sorted(_phases(run.metrics) - set(PHASES))]
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


def _phases(rows: Iterable[Row]) -> set[str]:
    return {key.removeprefix("time/") for row in rows for key in row if key.startswith("time/")} - {"step"}


def _reward_table(run: _Run) -> list[dict[str, Any]]:
    """A row per figure of pairs, reward and part: training and held-out, at first and now."""
    keys = {key for row in [*run.metrics[-1:], *run.heldout[-1:]] for key in row}
    table = []
    for own, label, _ in run.measured:
        for key in sorted(k for k in keys if k == own or k.startswith(f"{own}/")):
            training = [value for _, value in run.column(key) if value is not None]
            held = [row[key] for row in run.heldout if row.get(key) is not None]
            table.append(
                {
                    "name": label if key == own else key.removeprefix(f"{own}/"),
                    "part": key != own,
                    "weight": run.trained.get(label) if key == own else None,
                    "training": (_mean(training[:_RECENT]), _mean(training[-_RECENT:])) if training else None,
                    "heldout": (held[0], held[-1], _signed(held[-1] - held[0])) if held else None,
                }
            )
    return table


def _failures(run: _Run) -> list[dict[str, Any]]:
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


def _config(run: _Run) -> list[dict[str, Any]]:
    """Every setting with where it came from: the command line, the recipe, or a default."""

    def source(key: str) -> str:
        if any(key == k or key.startswith((f"{k}.", f"{k}[")) for k in run.overridden):
            return "command line"
        return "recipe" if key in run.given else "default"

    return [{"key": k, "value": json.dumps(v, ensure_ascii=False), "source": source(k)} for k, v in _flat(run.resolved)]


def _last_values(run: _Run) -> list[dict[str, Any]]:
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


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{short(round(abs(value), 4))}"
