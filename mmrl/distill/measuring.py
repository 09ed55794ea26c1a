"""How well a student agrees with the judge on verdicts that it was not trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its parts are loaded when they are first used
import torch
from torch import Tensor

from mmrl.distill.formulas import sureness, threshold_of
from mmrl.json_types import JsonObject
from mmrl.judge.calibration import calibration
from mmrl.judge.statistics import auc, rows_of, spearman

_DRAWS = 1000
CLEAR = 0.1
"""Pairs whose verdicts are nearer than this are not counted: their order is the judge's noise."""
SHARES = (0.1, 0.2, 0.3, 0.5)
"""Shares of samples to ask the judge about, for which the thresholds are printed."""


@dataclass(frozen=True)
class Agreement:
    """Of a student with the judge. ``order``: of the pairs of one group whose verdicts differ clearly (``CLEAR``), the
    share that it orders alike, with an interval of 95 % (bootstrap over prompts); 0.5 is chance. ``area``: under the
    ROC curve of verdicts of 0.5 or more; NaN where all are on one side. ``calibration``: the expected calibration
    error, and ``error`` the mean distance, of calibrated verdicts."""

    samples: int
    prompts: int
    order: tuple[float, float, float]
    pairs: int
    spearman: float
    kendall: float
    area: float
    calibration: float
    error: float

    @property
    def better_than_chance(self) -> bool:
        """Whether the interval is above chance; without pairs, whether the ranks correlate at all."""
        return self.order[1] > 0.5 if self.pairs else self.spearman > 0

    def as_json(self) -> dict[str, float | int | list[float | None] | None]:
        """JSON, with null for what is not known."""
        return {
            "samples": self.samples,
            "prompts": self.prompts,
            "order": [_finite(value) for value in self.order],
            "pairs": self.pairs,
            "spearman": _finite(self.spearman),
            "kendall": _finite(self.kendall),
            "auc": _finite(self.area),
            "calibration_error": _finite(self.calibration),
            "mean_error": _finite(self.error),
        }


@dataclass(frozen=True)
class Asking:
    """With ``judge_below: threshold`` the judge is asked about the share ``asked``, and the order of pairs is
    ``order``."""

    threshold: float
    asked: float
    order: float

    def as_json(self) -> JsonObject:
        return {"judge_below": self.threshold, "asked": self.asked, "order": _finite(self.order)}


def agreement(said: Tensor, verdicts: Tensor, groups: Sequence[int], prompts: Sequence[int]) -> Agreement:
    """Of calibrated verdicts ``said`` ``[N]`` with the judge's; the numbers of each sample's group and prompt."""
    ours, judge = said.double().tolist(), verdicts.double().tolist()
    of_prompt = rows_of(prompts)
    counts = np.array(
        [_alike([ours[n] for n in rows], [judge[n] for n in rows], [groups[n] for n in rows]) for rows in of_prompt]
    )
    kendall = scipy.stats.kendalltau(ours, judge).statistic if len({*ours}) > 1 and len({*judge}) > 1 else math.nan
    return Agreement(
        len(ours),
        len(of_prompt),
        _interval(counts),
        int(counts[:, 1].sum()),
        spearman(ours, judge),
        float(kendall),
        auc(ours, [value >= 0.5 for value in judge]),
        calibration(ours, judge).error[0],
        float((said.double() - verdicts.double()).abs().mean()),
    )


def _alike(said: Sequence[float], judge: Sequence[float], groups: Sequence[int]) -> tuple[float, int]:
    """How many pairs of one group with clearly different verdicts ``said`` orders alike, and how many there are; where
    it says the same of both, the pair counts half."""
    alike, pairs = 0.0, 0
    for rows in rows_of(groups):
        ours, theirs = (np.array([of[n] for n in rows]) for of in (said, judge))
        apart = theirs[:, None] - theirs[None, :]
        above = apart >= CLEAR
        alike += float((0.5 * (np.sign(ours[:, None] - ours[None, :]) + 1))[above].sum())
        pairs += int(above.sum())
    return alike, pairs


def _interval(counts: np.ndarray) -> tuple[float, float, float]:
    """The share of all pairs that are alike, of counts ``[prompts, (alike, pairs)]``, and the interval."""
    if not counts[:, 1].sum():
        return math.nan, math.nan, math.nan
    draw = np.random.default_rng(0)
    again = counts[draw.integers(0, len(counts), (_DRAWS, len(counts)))].sum(1)
    shares = again[again[:, 1] > 0]
    low, high = np.quantile(shares[:, 0] / shares[:, 1], (0.025, 0.975))
    alike, pairs = counts.sum(0)
    return float(alike / pairs), float(low), float(high)


def askings(said: Tensor, verdicts: Tensor, groups: Sequence[int]) -> list[Asking]:
    """What the thresholds for ``SHARES`` would do on these samples."""
    sure, found = sureness(said), []
    for share in SHARES:
        threshold = threshold_of(sure, share)
        asked = sure < threshold
        mixed = torch.where(asked, verdicts.double(), said.double())
        alike, pairs = _alike(mixed.tolist(), verdicts.double().tolist(), groups)
        order = alike / pairs if pairs else math.nan
        found.append(Asking(threshold, float(asked.double().mean()), order))
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
