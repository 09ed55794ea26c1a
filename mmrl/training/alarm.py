"""An alarm against over-optimisation with a bounded chance of a false one over a whole run (docs/reference/alarm.md).

It reads rewards that are never trained on, sample by sample: the same held-out prompt with the same noise, before
training and now. Let ``dr`` be the change of a trained reward ``r`` and ``du`` that of an untrained one ``u``, in
standard deviations of the base model's scores and cut to [-1, 1]. The hypothesis of a healthy run is, for each pair,
that ``r`` has not risen (the mean of ``dr`` is at most 0) or that ``u`` has followed (the mean of ``follow * dr - du``,
cut likewise, is at most 0). A sample whose ``u`` was already the best one is not expected to follow.

*One evaluation.* The mean over ``BETS`` of ``prod_i (1 + bet x_i)`` is an e-value for "the mean of ``x`` is at
most 0" (the betting of Waudby-Smith and Ramdas, arXiv 2010.09686): its expectation is at most 1, for any number of
samples and without a normal distribution, because samples of given prompts differ by independent noise. The smaller one
of two e-values is an e-value for "one of the two hypotheses holds"; those of all pairs are averaged.

*A run.* Evaluations use the same noise, so their e-values depend on each other. Their sum, weighted by
``1 / (t (t + 1))`` for evaluation ``t``, is an e-value whatever the dependence (Vovk and Wang, arXiv 1912.06116), and
it never falls. Its maximum therefore exceeds ``1 / alpha`` with a probability of at most ``alpha``, however long the
run is: the mean lags that are not rejected are a confidence sequence.

Departures: bets are a fixed mixture, not predicted from earlier samples, so that the order of samples and the number of
controllers do not matter. The standard deviations are those of the base model's samples, taken as known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mmrl.core.json_types import JsonObject, as_integer, as_list, as_number, as_object
from mmrl.training.guards import EVIDENCE, GOOD

BETS = (0.95, 0.5, 0.25)
MOST = 60.0
"""The largest logarithm of an e-value that is kept."""

Scores = Mapping[str, Sequence[float | None]]
"""By name in heldout.jsonl the scores of an evaluation's samples, in the order of their slots; None: no score."""
Array = NDArray[np.float64]


class Alarm:
    """Final class: reads the samples of one evaluation after the other, the base model's first. It depends on nothing
    else, so it is equal on every controller and rebuilt on resume.

    ``weights``: by label those of the trained rewards; ``untrained``: labels. ``alpha``, ``follow``: ``eval.guards``.
    """

    def __init__(self, weights: Mapping[str, float], untrained: Sequence[str], alpha: float, follow: float) -> None:
        self.weights, self.untrained, self.alpha, self.follow = weights, untrained, alpha, follow
        self._base: dict[str, Array] = {}
        self._seen = 0
        self._sums = dict.fromkeys(untrained, 0.0)
        self.good = 0

    def saw(self, step: int, scores: Scores) -> dict[str, float]:
        """Read an evaluation; returns its metrics: the evidence, that of each reward, and ``GOOD``."""
        now = {k: np.array([math.nan if v is None else v for v in of], float) for k, of in scores.items()}
        if not self._base:
            self._base, self.good = now, step
            return {}
        self._seen += 1
        gains = [
            np.sign(weight) * _change(self._base[name], now[name])
            for label, weight in self.weights.items()
            if weight and (name := f"reward/{label}") in now and name in self._base
        ]
        found = {
            label: float(np.mean([self._e_value(name, now[name], gain) for gain in gains]))
            for label in self.untrained
            if gains and (name := f"reward/{label}") in now and name in self._base
        }
        for label, value in found.items():
            self._sums[label] += value / (len(self.untrained) * self._seen * (self._seen + 1))
        if sum(found.values()) <= len(found):
            self.good = step
        each = {f"{EVIDENCE}/{label}": self.alpha * value for label, value in self._sums.items()}
        return {EVIDENCE: sum(each.values()), **each, GOOD: self.good}

    def saw_before(self, rows: Sequence[JsonObject]) -> None:
        """Read the rows of heldout_samples.jsonl of a run that goes on."""
        for row in rows:
            values = as_object(row["values"])
            if any(name.startswith("reward/") for name in values):
                scores = {k: [None if v is None else as_number(v) for v in as_list(of)] for k, of in values.items()}
                self.saw(as_integer(row["step"]), scores)

    def _e_value(self, name: str, now: Array, gain: Array) -> float:
        """The evidence that a trained reward rose by ``gain`` and the untrained one called ``name`` did not follow."""
        base = self._base[name]
        change, size = _change(base, now), min(len(base), len(now), len(gain))
        room = base[:size] < np.max(base[np.isfinite(base)], initial=-math.inf)
        lags = self.follow * room * np.nan_to_num(gain[:size]) - change[:size]
        return min(e_value(gain), e_value(np.clip(lags, -1.0, 1.0)))


def e_value(values: Array) -> float:
    """The evidence that the mean of ``values`` is above 0; 1 without one. Those that are not finite are left out, and
    none of the others is below -1."""
    known = values[np.isfinite(values)]
    logs = [float(np.log1p(bet * known).sum()) for bet in BETS]
    return sum(math.exp(min(one, MOST)) for one in logs) / len(BETS)


def _change(base: Array, now: Array) -> Array:
    """``now - base`` in standard deviations of ``base``, cut to [-1, 1]; of both where the base's scores are equal."""
    size = min(len(base), len(now))
    known = [of[np.isfinite(of)] for of in (base, now)]
    spread = np.std(known[0]) if len(known[0]) else 0.0
    spread = spread or (np.std(np.concatenate(known)) if len(known[1]) else 0.0)
    return np.clip((now[:size] - base[:size]) / spread, -1.0, 1.0) if spread else np.zeros(size)
