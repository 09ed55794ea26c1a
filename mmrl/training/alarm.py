"""An alarm against over-optimisation with a bounded chance of a false one over a whole run (docs/reference/alarm.md).

It reads rewards that are never trained on, sample by sample: the same held-out prompt with the same noise, before
training and now. Let ``dr`` be the change of a trained reward ``r`` and ``du`` that of an untrained one ``u``, in
standard deviations of the base model's scores and cut to [-1, 1]. The hypothesis of a healthy run is, for each pair,
that ``r`` has not risen (the mean of ``dr`` is at most 0) or that ``u`` has followed (the mean of
``follow * dr - du``, cut likewise, is at most 0). A sample whose ``u`` was already the best one is not expected to
follow a rise.

*One evaluation.* ``p_value`` is small where the mean of values in [-1, 1] is above 0; no normal distribution is
assumed. The larger one of two p-values is a p-value for "one of the two hypotheses holds".

*More samples.* An evaluation whose p-value is below ``LOOK`` goes on to ``eval.guards.samples``, as the base model's
did, and the p-value of all of them is tested alone. That it was chosen by the first ones does not matter: to be chosen
and to be found guilty is no more likely than to be found guilty.

*A run.* Evaluations share prompts and noise, so they depend on each other. Evaluation ``t`` is tested at the level
``alpha * 3 / ((t + 2) (t + 3))``, divided by the number of pairs. These levels sum to ``alpha``: whatever the
dependence, the chance that any of them ever finds a healthy run guilty is at most ``alpha``, however long the run is.
In other words the means that are not rejected are a confidence sequence, by the union bound.

Departures: the standard deviations are those of the base model's samples, taken as known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mmrl.core.json_types import JsonObject, as_integer, as_list, as_number, as_object
from mmrl.training.guards import EVIDENCE, GOOD

SIGN = 0.1
"""An evaluation with a p-value below this is no good one."""
LOOK = 0.25
"""One with a p-value below this is worth more samples. In a healthy run few are."""
_NODES = np.sinh(np.arange(0.05, 12.0, 0.1))
"""Where the integrand of ``p_value`` is summed: close to one another where it is large, far where it vanishes."""
_WIDTHS = 0.1 * np.hypot(1.0, _NODES)
_LEAST = 1e-300
"""No smaller p-value is told apart."""

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
        self._most = dict.fromkeys(untrained, 0.0)
        self.good = 0

    @property
    def base_samples(self) -> int | None:
        """The samples of the base model, beyond which none is compared; None before its evaluation."""
        return max((len(of) for of in self._base.values()), default=None)

    def wants_more(self, scores: Scores) -> bool:
        """Whether this evaluation goes on to ``eval.guards.samples``: the base model's, and one with a p-value below
        ``LOOK`` while no alarm is raised."""
        raised = max(self._most.values(), default=0.0) >= 1
        return not self._base or (not raised and min(self._p_values(_arrays(scores)).values(), default=1.0) < LOOK)

    def saw(self, step: int, scores: Scores) -> dict[str, float]:
        """Read an evaluation; returns its metrics: the evidence, that of each reward, and ``GOOD``."""
        now = _arrays(scores)
        if not self._base:
            self._base, self.good = now, step
            return {}
        self._seen += 1
        pairs = len(self._trained) * len(self.untrained)
        level = 3 * self.alpha / ((self._seen + 2) * (self._seen + 3) * max(1, pairs))
        found = self._p_values(now)
        for label, p in found.items():
            self._most[label] = max(self._most[label], level / max(p, _LEAST))
        if min(found.values(), default=1.0) >= SIGN:
            self.good = step
        each = {f"{EVIDENCE}/{label}": value for label, value in self._most.items()}
        return {EVIDENCE: max(each.values(), default=0.0), **each, GOOD: self.good}

    def saw_before(self, rows: Sequence[JsonObject]) -> None:
        """Read the rows of heldout_samples.jsonl of a run that goes on."""
        for row in rows:
            values = as_object(row["values"])
            if any(name.startswith("reward/") for name in values):
                more = as_object(as_object(row["more"])["values"]) if "more" in row else {}
                self.saw(as_integer(row["step"]), with_more(_numbers(values), _numbers(more)))

    @property
    def _trained(self) -> list[tuple[str, float]]:
        """The rewards that are trained on, and the signs of their weights."""
        return [(f"reward/{label}", math.copysign(1.0, weight)) for label, weight in self.weights.items() if weight]

    def _p_values(self, now: Mapping[str, Array]) -> dict[str, float]:
        """The least p-value of each untrained reward that was measured, over the trained ones."""
        base = self._base
        gains = [sign * _change(base[r], now[r]) for r, sign in self._trained if r in now and r in base]
        names = {label: f"reward/{label}" for label in self.untrained}
        return {
            label: min((self._p_value(name, now[name], gain) for gain in gains), default=1.0)
            for label, name in names.items()
            if name in now and name in base
        }

    def _p_value(self, name: str, now: Array, gain: Array) -> float:
        """It is small where a trained reward rose by ``gain`` and the untrained one called ``name`` did not follow."""
        base = self._base[name]
        change, size = _change(base, now), min(len(base), len(now), len(gain))
        best = base[:size] >= np.max(base[np.isfinite(base)], initial=-math.inf)
        expected = np.nan_to_num(np.where(best, np.minimum(gain[:size], 0.0), gain[:size]))
        lags = self.follow * expected - change[:size]
        return max(p_value(gain), p_value(np.clip(lags, -1.0, 1.0)))


def with_more(scores: Scores, more: Scores) -> Scores:
    """The ``scores`` of an evaluation with those of its further samples behind them."""
    if not more:
        return scores
    size = max(map(len, more.values()))
    return {name: [*of, *more.get(name, [None] * size)] for name, of in scores.items()}


def _numbers(values: JsonObject) -> Scores:
    return {k: [None if v is None else as_number(v) for v in as_list(of)] for k, of in values.items()}


def _arrays(scores: Scores) -> dict[str, Array]:
    return {k: np.array([math.nan if v is None else v for v in of], float) for k, of in scores.items()}


def p_value(values: Array) -> float:
    """The p-value for "the mean is at most 0" of values ``[N]`` in [-1, 1]; those that are not finite are left out.

    Gaffke (2005), and Learned-Miller and Thomas (arXiv 1905.06208): the probability that ``sum_i E_i x_i - E_0`` is at
    most 0 for independent exponential ``E``, with -1, the least possible value, beside the sample. For values of -1 and
    1 it is the exact sign test. That it is never too small is proved for two possible values, and a conjecture without
    a known counterexample for others. The probability is the integral of the moment generating function through its
    saddle point.
    """
    x = np.append(values[np.isfinite(values)], -1.0)
    if x.mean() <= 0:  # near one half or above, which is no sign of anything
        return 1.0
    low, high = -1.0, 0.0  # the saddle point lies between: the derivative of -log(1 - s x), summed, rises
    for _ in range(60):
        half = (low + high) / 2
        low, high = (low, half) if np.sum(x / (1 - half * x)) > 0 else (half, high)
    s = (low + high) / 2
    spread = np.sqrt(np.sum((x / (1 - s * x)) ** 2))
    at = s + 1j * _NODES / spread
    logs = -np.sum(np.log1p(-at * x[:, None]), 0)
    return float(np.clip(np.sum((np.exp(logs) / -at).real * _WIDTHS) / (spread * np.pi), 0.0, 1.0))


def _change(base: Array, now: Array) -> Array:
    """``now - base`` in standard deviations of ``base``, cut to [-1, 1]; of both where the base's scores are equal."""
    size = min(len(base), len(now))
    known = [of[np.isfinite(of)] for of in (base, now)]
    spread = np.std(known[0]) if len(known[0]) else 0.0
    spread = spread or (np.std(np.concatenate(known)) if len(known[1]) else 0.0)
    return np.clip((now[:size] - base[:size]) / spread, -1.0, 1.0) if spread else np.zeros(size)
