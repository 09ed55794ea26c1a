"""Compare runs on their held-out measure. Runs that differ by their seed alone are one group."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import scipy  # its parts are loaded when they are first used

from mmrl.core.errors import UserError
from mmrl.core.grouping import grouped
from mmrl.core.json_types import Json, JsonObject
from mmrl.report.heldout import (
    LEVEL,
    SUCCESS,
    Interval,
    PromptSums,
    Samples,
    change,
    half_width,
    level,
    measure_of,
    read_samples,
)
from mmrl.report.recorded import RecordedRun, flat, read_run

SEEDS = ("seed", "name", "log", "profile")
"""Settings in which the runs of a group may differ."""
MOST = 8
"""Groups that are told apart by colour."""
Makes = Literal["texts", "pictures", "clips"]


@dataclass(frozen=True)
class Group:
    """Runs of the same settings with ``samples`` of each; ``label`` is a letter, ``name`` the folder of the first."""

    label: str
    name: str
    runs: Sequence[RecordedRun]
    samples: Sequence[Samples]

    @property
    def seeds(self) -> list[int]:
        return [seed if isinstance(seed := run.setting("seed"), int) else 0 for run in self.runs]

    def at(self, place: int, key: str) -> list[float]:
        """The measure of each run in its first (0) or last (-1) evaluation that has it."""
        return [[row[key] for row in run.heldout if row.get(key) is not None][place] for run in self.runs]

    def curve(self, key: str) -> list[tuple[int, float, float | None]]:
        """(step, mean, standard deviation) over the runs, at steps where all have an evaluation; None of one run."""
        rows = [{row["step"]: row[key] for row in run.heldout if row.get(key) is not None} for run in self.runs]
        steps = sorted(set.intersection(*[set(of) for of in rows]))
        values = {step: [of[step] for of in rows] for step in steps}
        return [(n, statistics.fmean(of), statistics.stdev(of) if len(of) > 1 else None) for n, of in values.items()]

    def sums(self, key: str) -> PromptSums:
        """The sum over all runs that have it, for each prompt of the last evaluations; empty where one kept none."""
        found: dict[str, tuple[float, float]] = {}
        for run, samples in zip(self.runs, self.samples, strict=True):
            last = [row["step"] for row in run.heldout if row.get(key) is not None][-1]
            own = samples.get(last, {}).get(key, {})
            if not own:
                return {}
            for prompt, (total, weight) in own.items():
                before = found.get(prompt, (0.0, 0.0))
                found[prompt] = before[0] + total, before[1] + weight
        return found

    def final(self, key: str) -> Interval:
        """The measure after training with its interval: over seeds (Student's t), or of a single run over prompts."""
        values = self.at(-1, key)
        mean = statistics.fmean(values)
        if len(values) > 1:
            half = half_width(values)
            return Interval(mean, mean - half, mean + half, "seeds", len(values))
        return level(self.sums(key)) or Interval(mean, math.nan, math.nan, "prompts", 0)


@dataclass(frozen=True)
class Difference(Interval):
    """By how much the measure of a group is above the first group's."""

    @property
    def verdict(self) -> Literal["higher", "lower", "unclear"]:
        if not (self.low > 0 or self.high < 0):
            return "unclear"
        return "higher" if self.low > 0 else "lower"


@dataclass(frozen=True)
class Comparison:
    """Groups, of which the first is compared with, on one ``measure``; ``settings``: those that differ, by group."""

    measure: str
    groups: Sequence[Group]
    settings: Mapping[str, Sequence[Json]]
    makes: Makes

    def difference(self, group: Group) -> Difference | None:
        """How ``group`` differs from the first; None for the first itself."""
        return None if group is self.groups[0] else difference(self.groups[0], group, self.measure)


def compare_runs(paths: Sequence[Path], measure: str | None = None, *, flag: str = "--measure ") -> Comparison:
    """Read the runs in ``paths`` and group them. ``measure``: a figure of heldout.jsonl; None takes the runs' own.
    ``flag``: how the caller gives it, for messages.

    Raises ``UserError`` for fewer than two runs, a folder that is none, a run without an evaluation, and for runs that
    make other things, measure others, or were evaluated on other prompts.
    """
    if len(paths) < 2:
        alone = f"; the report of {paths[0]} shows one run" if paths else ""
        raise UserError(f"a comparison needs two runs or more, and got {len(paths)}{alone}")
    real = [path.resolve() for path in paths]
    if twice := next((path for path, of in zip(paths, real, strict=True) if real.count(of) > 1), None):
        raise UserError(f"{twice} is given twice; name every run once")
    runs = [read_run(path) for path in paths]
    for run in runs:
        if not run.resolved:
            raise UserError(f"{run.path} has no resolved.json, so its settings are not known; leave it out")
        if not run.heldout:
            raise UserError(f"{run.path} has no held-out evaluation to compare; set eval.every, or wait for one")
    makes = _same_kind(runs)
    key = _same_measure(runs, measure, flag)
    groups = _grouped(runs)
    if len(groups) > MOST:
        raise UserError(f"{len(groups)} settings are too many for one chart; compare at most {MOST} at a time")
    _same_prompts(groups, key)
    return Comparison(key, groups, _differing(groups), makes)


def difference(first: Group, other: Group, key: str) -> Difference:
    """How much higher ``other`` ends than ``first``. Of several seeds each: the interval of Welch's t-test over seeds.
    Otherwise a paired bootstrap over the prompts that both have (``change``), which says nothing of seeds."""
    a, b = first.at(-1, key), other.at(-1, key)
    value = statistics.fmean(b) - statistics.fmean(a)
    if len(a) > 1 and len(b) > 1:
        if not statistics.pvariance(a) + statistics.pvariance(b):
            return Difference(value, value, value, "seeds", len(a) + len(b))
        found = scipy.stats.ttest_ind(b, a, equal_var=False).confidence_interval(LEVEL)
        return Difference(value, float(found.low), float(found.high), "seeds", len(a) + len(b))
    paired = change(first.sums(key), other.sums(key))
    if paired is None:
        return Difference(value, math.nan, math.nan, "prompts", 0)
    return Difference(paired.value, paired.low, paired.high, "prompts", paired.count)


def _same_kind(runs: Sequence[RecordedRun]) -> Makes:
    kinds: dict[Path, Makes] = {run.path: _makes(run) for run in runs}
    if len(set(kinds.values())) > 1:
        named = "; ".join(f"{path} makes {kind}" for path, kind in kinds.items())
        raise UserError(f"runs of different modalities cannot be compared ({named}); name runs of one")
    return next(iter(kinds.values()))


def _makes(run: RecordedRun) -> Makes:
    sampling = run.setting("sampling")
    if isinstance(sampling, Mapping) and "max_new_tokens" in sampling:
        return "texts"
    return "pictures" if run.setting("sampling.frames") is None else "clips"


def _same_measure(runs: Sequence[RecordedRun], wanted: str | None, flag: str) -> str:
    """The figure that all runs have: the one that is asked for, or the measure of each. Raises ``UserError``."""
    figures = [{key for row in run.heldout for key, value in row.items() if value is not None} for run in runs]
    both = {key for key in set.intersection(*figures) if "/" in key and not key.startswith(("guard/", "failed/"))}
    shared = sorted(both, key=lambda key: (not key.endswith(SUCCESS), key))
    named = repr(shared[0]) if shared and flag.endswith("=") else (shared or [""])[0]
    edit = f"give one that all have: {flag}{named}" if shared else "give eval.rewards the same reward in all"
    if len(shared) > 1:
        edit += f" (or {', '.join(shared[1:6])})"
    if wanted is not None:
        for run, keys in zip(runs, figures, strict=True):
            if wanted not in keys:
                raise UserError(f"{run.path} has no held-out {wanted}; {edit}")
        return wanted
    own = {run.path: measure_of(run) for run in runs}
    found = set(own.values())
    (key, *others) = found
    if others or key is None or key not in shared:
        named = "; ".join(f"{path}: {key or 'none'}" for path, key in own.items())
        raise UserError(f"these runs have different held-out measures ({named}); {edit}")
    return key


def _same_prompts(groups: Sequence[Group], key: str) -> None:
    """Raises ``UserError`` where two groups were evaluated on prompts of which they share none."""
    first = groups[0].sums(key)
    for group in groups[1:]:
        own = group.sums(key)
        if first and own and not set(first) & set(own):
            raise UserError(
                f"{group.runs[0].path} was evaluated on other prompts than {groups[0].runs[0].path}; compare runs with "
                "the same data.heldout"
            )


def _grouped(runs: Sequence[RecordedRun]) -> list[Group]:
    """The runs by their settings without those of ``SEEDS``, in the order in which they are given."""
    settings = ({key: value for key, value in run.resolved.items() if key not in SEEDS} for run in runs)
    found = grouped((json.dumps(of, sort_keys=True), run) for of, run in zip(settings, runs, strict=True))
    return [
        Group(chr(ord("A") + n), of[0].path.resolve().name, of, [read_samples(run.path) for run in of])
        for n, of in enumerate(found.values())
    ]


def _differing(groups: Sequence[Group]) -> dict[str, list[Json]]:
    """The settings that differ between groups, dotted, with the value of each; None where a group has none."""
    each = [dict(flat({k: v for k, v in of.runs[0].resolved.items() if k not in SEEDS})) for of in groups]
    keys = dict.fromkeys(key for of in each for key in of)
    values = {key: [of.get(key) for of in each] for key in keys}
    return {key: of for key, of in values.items() if any(value != of[0] for value in of)}


def as_json(found: Comparison) -> JsonObject:
    """The comparison as JSON data (docs/reference/json.md)."""
    return {
        "measure": found.measure,
        "makes": found.makes,
        "baseline": found.groups[0].label,
        "groups": [_group_json(found, group) for group in found.groups],
        "settings": found.settings,
    }


def _group_json(found: Comparison, group: Group) -> JsonObject:
    differs = found.difference(group)
    final = group.final(found.measure)
    return {
        "label": group.label,
        "name": group.name,
        "runs": [str(run.path) for run in group.runs],
        "seeds": group.seeds,
        "steps": [run.heldout[-1]["step"] for run in group.runs],
        "cpu_seconds": [run.metrics[-1].get("perf/cpu_seconds") if run.metrics else None for run in group.runs],
        "over_plan": [run.over_plan() for run in group.runs],
        "peak_over_plan": [run.over_plan("perf/peak_memory_mib", "plan/peak") for run in group.runs],
        "before": statistics.fmean(group.at(0, found.measure)),
        "after": vars(final),
        "difference": None if differs is None else {**vars(differs), "verdict": differs.verdict},
        "curve": [list(point) for point in group.curve(found.measure)],
    }
