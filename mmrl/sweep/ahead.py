"""Whether the setting that a search chose is ahead of the others, or chance chose it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmrl.report.heldout import PromptSums, change, half_width, label_in, measure_of, read_samples
from mmrl.report.recorded import read_run


@dataclass(frozen=True)
class Lead:
    """By how much the chosen setting is above another, as training wants it. ``over``: ``seeds`` or ``prompts``;
    ``low`` and ``high``: a paired interval of 95 %, NaN where nothing can be said."""

    value: float
    low: float
    high: float
    over: str

    @property
    def ahead(self) -> bool:
        return self.low > 0


def over_seeds(chosen: Mapping[int, float], other: Mapping[int, float]) -> Lead:
    """The lead by the values of each seed: the interval of the mean paired difference."""
    differences = [chosen[seed] - other[seed] for seed in chosen if seed in other]
    if not differences:
        return Lead(math.nan, math.nan, math.nan, "seeds")
    mean, half = statistics.fmean(differences), half_width(differences)
    return Lead(mean, mean - half, mean + half, "seeds")


def over_prompts(chosen: Path, other: Path, step: int | None = None) -> Lead:
    """The lead of a run over another on the held-out prompts that both have, after ``step`` (None: the last evaluation
    of both). It says nothing of other seeds."""
    first, second = read_run(chosen), read_run(other)
    key = measure_of(second)
    nothing = Lead(math.nan, math.nan, math.nan, "prompts")
    if key is None or not first.heldout or not second.heldout:
        return nothing
    last = second.heldout[-1]["step"]
    at = first.heldout[-1]["step"] if step is None else step
    sums = [_sums(path, n, key) for path, n in ((chosen, at), (other, last))]
    found = change(sums[1], sums[0])
    if found is None:
        return nothing
    low, high = (math.nan if end is None else end for end in (found.low, found.high))
    if second.trained.get(label_in(key) or "", 1.0) < 0:
        return Lead(-found.difference, -high, -low, "prompts")
    return Lead(found.difference, low, high, "prompts")


def _sums(path: Path, step: int, key: str) -> PromptSums:
    return read_samples(path).get(step, {}).get(key, {})
