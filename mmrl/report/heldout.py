"""The held-out measure of a run, and what can be said of its change: the same prompts are evaluated each time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy  # its parts are loaded when they are first used
from numpy.typing import NDArray

from mmrl.logging.metrics import of_pairs, read
from mmrl.logging.rundir import RunDir
from mmrl.report.charts import short
from mmrl.report.recorded import RecordedRun

SUCCESS = ("success", "correct", "accuracy")
"""Parts of a reward that say whether a sample is right."""
LEVEL = 0.95
RESAMPLES = 4000
_BATCH = 2_000_000
"""Numbers that are drawn at once."""
FEWEST = 6
"""Prompts that must have changed before a change is told from chance: of five that all rise, chance makes a change as
large in 2 of 32 cases, which is more than 5 %."""

PromptSums = Mapping[str, tuple[float, float]]
"""Of each prompt the sum of a figure over its samples and their weight, in one evaluation."""
Samples = Mapping[int, Mapping[str, PromptSums]]
"""Those of every evaluation by its step, and of every figure."""
Verdict = Literal["rose", "fell", "unclear"]


@dataclass(frozen=True)
class Interval:
    """A figure with an interval of 95 %; ``over``: what was resampled (``prompts``, ``seeds``), and how many. ``low``
    and ``high`` are NaN where nothing can be said."""

    value: float
    low: float
    high: float
    over: str
    count: int

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)

    @property
    def half(self) -> float:
        """Half of its width; NaN where there is none."""
        return (self.high - self.low) / 2

    def bounds(self, near: float) -> str:
        """``0.12 to 0.28``, with the digits that a difference of ``near`` needs; empty where there is none."""
        return f"{number(self.low, near)} to {number(self.high, near)}" if self.known else ""


@dataclass(frozen=True)
class Change(Interval):
    """By how much a figure changed over the prompts of both evaluations, of which ``changed`` did. Without an interval
    where these are too few."""

    before: float
    after: float
    changed: int

    @property
    def verdict(self) -> Verdict:
        if not (self.low > 0 or self.high < 0):
            return "unclear"
        return "rose" if self.low > 0 else "fell"


def measure_of(run: RecordedRun) -> str | None:
    """The figure of heldout.jsonl that says whether the run learned what its recipe is for; None where there is none.

    That is the metric of ``eval.early_stopping``; else of the first reward that is trained on with a weight above 0 its
    part ``success``, ``correct`` or ``accuracy``, or the reward itself. A recipe on given texts or pairs has the first
    reward of ``eval.rewards``, and without one the accuracy on held-out pairs.
    """
    keys = run.figures
    named = run.setting("eval.early_stopping.metric")
    if isinstance(named, str) and named in keys:
        return named
    wanted = [label for label, weight in run.trained.items() if weight > 0]
    for label in [*wanted, *run.trained, *run.labels]:
        if f"reward/{label}" in keys:
            return part_of(label, keys)
    figures = of_pairs(keys)
    return next((key for key in figures if key.endswith("/accuracy")), next(iter(figures), None))


def part_of(label: str, keys: Collection[str]) -> str:
    """The figure of a reward that says whether a sample is right, or the reward itself."""
    parts = [f"reward/{label}/{part}" for part in SUCCESS]
    return next((key for key in parts if key in keys), f"reward/{label}")


def label_in(key: str) -> str | None:
    """The reward that a figure belongs to; None for a figure of given pairs."""
    kind, _, rest = key.partition("/")
    return rest.partition("/")[0] if kind == "reward" or "@" in kind else None


def read_samples(path: Path) -> Samples:
    """By step of the evaluation and by figure, what heldout_samples.jsonl has; empty for runs that kept none."""
    found: dict[int, dict[str, PromptSums]] = {}
    for row in read(RunDir(path).heldout_samples):
        step, prompts, values = row.get("step"), row.get("prompts"), row.get("values")
        if not (isinstance(step, int) and isinstance(prompts, list) and isinstance(values, dict)):
            continue
        given = row.get("weights")
        listed: list[Any] = given if isinstance(given, list) and len(given) == len(prompts) else [None]
        numbers = all(isinstance(weight, int | float) for weight in listed)
        weights: list[float] = listed if numbers else [1.0] * len(prompts)
        columns = {
            str(key): [value if isinstance(value, int | float) else None for value in of]
            for key, of in values.items()
            if isinstance(of, list) and len(of) == len(prompts)
        }
        prompts = [str(prompt) for prompt in prompts]
        halved = {key: _ties(key, columns) for key in columns}
        found.setdefault(step, {}).update({key: _sums(prompts, of, weights) for key, of in halved.items()})
    return found


def change_of(run: RecordedRun, samples: Samples, key: str) -> Change | None:
    """How ``key`` changed from the first to the last evaluation that has it; None where their samples are not kept."""
    steps = [row["step"] for row in run.heldout if row.get(key) is not None]
    if len(steps) < 2:
        return None
    first, last = (samples.get(step, {}).get(key) for step in (steps[0], steps[-1]))
    return change(first, last) if first and last else None


def change(before: PromptSums, after: PromptSums) -> Change | None:
    """How a figure changed from ``before`` to ``after``, over the prompts that both have; None where they share none.

    The interval is that of a paired bootstrap (Efron and Tibshirani 1993, ch. 13, percentiles): prompts are drawn with
    replacement, each with its samples of both evaluations, since samples of a prompt are alike. The draws have a fixed
    seed, so that a run has one interval.
    """
    shared = [prompt for prompt in before if prompt in after and before[prompt][1] and after[prompt][1]]
    if not shared:
        return None
    first, last = (np.array([of[prompt] for prompt in shared], dtype=np.float64) for of in (before, after))
    changed = int((first[:, 0] / first[:, 1] != last[:, 0] / last[:, 1]).sum())
    low, high = _bounds(last, first) if changed >= FEWEST else (math.nan, math.nan)
    before_mean, after_mean = _mean(first), _mean(last)
    return Change(after_mean - before_mean, low, high, "prompts", len(shared), before_mean, after_mean, changed)


def level(sums: PromptSums) -> Interval | None:
    """The mean of a figure over the samples of an evaluation, with an interval over its prompts."""
    rows = np.array([of for of in sums.values() if of[1]], dtype=np.float64).reshape(-1, 2)
    if not len(rows):
        return None
    low, high = _bounds(rows) if len(rows) >= FEWEST else (math.nan, math.nan)
    return Interval(_mean(rows), low, high, "prompts", len(rows))


def number(value: float, near: float) -> str:
    """``value`` with as many digits as a difference of ``near`` needs, at least two of numbers below 10."""
    if near and math.isfinite(near) and abs(near) < 1e-4:
        return short(value)
    most = 0 if abs(value) >= 10 else 2
    digits = most if not near or not math.isfinite(near) else max(most, -math.floor(math.log10(abs(near))))
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if not float(text) else text


def signed(value: float, near: float) -> str:
    text = number(value, near)
    return text if text.startswith("-") else f"+{text}"


def _bounds(rows: NDArray[np.float64], less: NDArray[np.float64] | None = None) -> tuple[float, float]:
    """The interval of the mean of ``rows``, less that of ``less`` (sums and weights ``[prompts, 2]`` each)."""
    columns = [*rows.T, *(() if less is None else less.T)]

    def statistic(*drawn: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        sums = [of.sum(axis) for of in drawn]
        means = [sums[i] / sums[i + 1] for i in range(0, len(sums), 2)]
        return means[0] if less is None else means[0] - means[1]

    found = scipy.stats.bootstrap(
        columns,
        statistic,
        n_resamples=RESAMPLES,
        batch=max(1, _BATCH // len(rows)),
        paired=True,
        vectorized=True,
        confidence_level=LEVEL,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def _mean(rows: NDArray[np.float64]) -> float:
    total, weight = rows.sum(0)
    return float(total / weight)


def _ties(key: str, columns: Mapping[str, Sequence[float | None]]) -> Sequence[float | None]:
    """An accuracy on pairs with half a point for a tie: before training the policy is the reference, and prefers no
    text of any pair."""
    kind, _, name = key.partition("/")
    margins = columns.get(f"{kind}/margin")
    if name != "accuracy" or margins is None:
        return columns[key]
    return [0.5 if margin == 0 else value for value, margin in zip(columns[key], margins, strict=True)]


def _sums(prompts: Sequence[str], values: Sequence[float | None], weights: Sequence[float]) -> PromptSums:
    found: dict[str, tuple[float, float]] = {}
    for prompt, value, weight in zip(prompts, values, weights, strict=True):
        if value is not None and math.isfinite(value):
            total, whole = found.get(prompt, (0.0, 0.0))
            found[prompt] = total + value * weight, whole + weight
    return found


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean over seeds (Student's t); NaN of fewer than two."""
    if len(values) < 2:
        return math.nan
    quantile = float(scipy.stats.t.ppf((1 + LEVEL) / 2, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
