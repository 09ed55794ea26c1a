"""Accumulate the metrics of one step, slice by slice."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict, TypeVar

from torch import Tensor

from mmrl.algorithms.objective import Loss
from mmrl.core.errors import NotFiniteError, UserError
from mmrl.core.transfer import read

FIRST_RATIO_TOLERANCE = {"float32": 1e-5, "half": 5e-3}
"""Largest |ratio - 1| allowed before the first update of a step. In half precision the same code on the same shapes is
also exact, but an accelerator may choose different kernels."""

_FIRST_RATIO = "policy/first_ratio_max_dev"
_FIRST = {
    "policy/ratio_max_dev": "a log-probability that the update computed anew",
    _FIRST_RATIO: "a log-probability that the update computed anew",
    "mismatch/log_prob_gap_max": "a log-probability that the update computed anew",
    "policy/loss": "the loss",
}
"""The cause, if this is the first metric that is not finite."""
Number = float | Tensor
"""A tensor has one element; it is copied from its device only when ``StepMetrics.sums`` needs it."""
T = TypeVar("T")


class Sums(TypedDict):
    """The contribution of one device, or one controller, to the metrics: plain numbers by name."""

    updates: int
    means: dict[str, float]
    """Sums over slices, already divided by the entries of their update."""
    pairs: dict[str, tuple[float, float]]
    """A sum and its weight."""
    maxima: dict[str, float]
    counts: dict[str, float]
    """Counts, which are summed over controllers."""


class StepMetrics:
    """The metrics of a step: sums become means over an update's entries, maxima stay maxima, and values that are set
    several times are averaged.

    Tensors are copied from their device all together in ``sums``, so that no slice waits for its device.

    ``weight``: the weight of what this controller will ``set`` in the mean over controllers: its number of slots.
    ``updates``: those that have ended.
    """

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self._means: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._pairs: defaultdict[str, list[tuple[Number, Number]]] = defaultdict(list)
        self._counts: defaultdict[str, float] = defaultdict(float)
        self.updates = 0
        self._maxima: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._merged: list[Sums] = []

    def add(self, loss: Loss, total: float, *, first_update: bool) -> None:
        """Add a slice's sums and maxima. ``first_update``: no weight has changed in this step, so the ratio is 1."""
        for name, value in loss.sums.items():
            self._means[name].append(value / total)
        for name, value in loss.maxima.items():
            self._maxima[name].append(value.detach())
        if first_update and "policy/ratio_max_dev" in loss.maxima:
            self._maxima[_FIRST_RATIO].append(loss.maxima["policy/ratio_max_dev"].detach())

    def gather(self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor], count: Number) -> None:
        """Add a slice with ``count`` tokens: ``sums`` become means over the step's tokens, ``maxima`` stay maxima."""
        for name, value in sums.items():
            self._pairs[name].append((value, count))
        for name, value in maxima.items():
            self._maxima[name].append(value.detach())

    def set(self, values: Mapping[str, float]) -> None:
        """Set values of the step; a value that is set by several updates (a gradient norm) is averaged."""
        for name, value in values.items():
            self._pairs[name].append((value * self.weight, self.weight))

    def extend(self, name: str, values: Tensor) -> None:
        """Add values per sample from inside the update; they are averaged."""
        self._pairs[name].extend((value, 1.0) for value in values.double().unbind())

    def count(self, values: Mapping[str, float]) -> None:
        """Add counts, which are summed over all controllers."""
        for name, value in values.items():
            self._counts[name] += value

    def check_first_ratio(self, *, exact: bool) -> None:
        """Raise ``UserError`` if sampling and replay disagree before any weight has changed, in slices that were
        merged."""
        tolerance = FIRST_RATIO_TOLERANCE["float32" if exact else "half"]
        found = _largest(one["maxima"].get(_FIRST_RATIO, 0.0) for one in self._merged)
        if not found <= tolerance:
            raise UserError(
                f"before the first update the largest |ratio - 1| is {found:.3g}, above {tolerance:g}: sampling "
                "and replay do not compute the same values, and clipping at such differences trains on noise. Use the "
                "same batch shapes (leave sampling.batch_size out), the same attention, no dropout, and torch.compile "
                "on both sides or neither."
            )

    def check_gap(self, limit: float, *, exact: bool) -> None:
        """Raise ``UserError`` if log-probs of sampling and training are further apart than ``limit``, for the same
        weights: a token's in float32 (``exact``), else their mean."""
        if exact:
            found = _largest(one["maxima"].get("mismatch/log_prob_gap_max", 0.0) for one in self._merged)
        else:
            pairs = [one["pairs"].get("mismatch/log_prob_gap", (0.0, 0.0)) for one in self._merged]
            found = sum(total for total, _ in pairs) / max(1.0, sum(count for _, count in pairs))
        if not found <= limit:
            raise UserError(
                f"rollout.max_gap: {'a token has' if exact else 'tokens have on average'} log-probs {found:.3g} apart "
                f"in sampling and in training, with the same weights; at most {limit:g} is allowed. The forward "
                "with a key-value cache computes something else than the one without: the run would train on noise. "
                "Use another release of transformers, or an engine (rollout.engine: vllm), or set rollout.max_gap to "
                "null to train all the same"
            )

    def check_finite(self) -> None:
        """Raise ``NotFiniteError`` if a metric of the update's slices is not finite."""
        maxima, means = [one["maxima"] for one in self._merged], [one["means"] for one in self._merged]
        for found in (*maxima, *means):  # the maxima are of log-probs, which come before the loss
            bad = [name for name, value in found.items() if not math.isfinite(value)]
            if bad:
                what = _FIRST.get(bad[0], "what the update computed")
                raise NotFiniteError(f"{what} is not finite: {bad[0]} is {found[bad[0]]}")

    def means(self, gather: Callable[[Sums], list[Sums]] = lambda sums: [sums]) -> dict[str, float]:
        """The step's metrics; ``gather`` collects the sums of all controllers."""
        found = gather(self.sums())
        updates = max(1, *(one["updates"] for one in found))
        whole = _added(found)
        out = {name: value / updates for name, value in whole["means"].items()}
        out |= {name: total / count if count else 0.0 for name, (total, count) in whole["pairs"].items()}
        return out | whole["counts"] | whole["maxima"]

    def merge(self, found: Sequence[Sums]) -> None:
        """Add the sums of other devices, each over its own slices."""
        self._merged += found

    def sums(self) -> Sums:
        """Everything that was added, for ``merge`` on another device or ``gather`` over controllers."""
        each = [value for of in (*self._means.values(), *self._maxima.values()) for value in of]
        number = _known([*each, *(value for of in self._pairs.values() for pair in of for value in pair)])
        pairs = {k: (sum(number(v) for v, _ in of), sum(number(n) for _, n in of)) for k, of in self._pairs.items()}
        own: Sums = {
            "updates": self.updates,
            "means": {name: sum(map(number, of)) for name, of in self._means.items()},
            "pairs": pairs,
            "maxima": {name: _largest(map(number, of)) for name, of in self._maxima.items()},
            "counts": self._counts,
        }
        return _added([own, *self._merged])


def _added(found: Sequence[Sums]) -> Sums:
    """The combined sums: pairs and counts are added, maxima are maximised."""
    means, counts = _by_name([one["means"] for one in found]), _by_name([one["counts"] for one in found])
    pairs, maxima = _by_name([one["pairs"] for one in found]), _by_name([one["maxima"] for one in found])
    return {
        "updates": max(one["updates"] for one in found),
        "means": {name: sum(values) for name, values in means.items()},
        "counts": {name: sum(values) for name, values in counts.items()},
        "pairs": {n: (sum(t for t, _ in of), sum(c for _, c in of)) for n, of in pairs.items()},
        "maxima": {name: functools.reduce(_larger, others, largest) for name, (largest, *others) in maxima.items()},
    }


def _by_name(found: Sequence[Mapping[str, T]]) -> dict[str, list[T]]:
    """All values under each name, in the order of ``found``."""
    names = dict.fromkeys(name for one in found for name in one)
    return {name: [one[name] for one in found if name in one] for name in names}


def _known(given: Iterable[Number]) -> Callable[[Number], float]:
    """A function that returns the value of each of ``given``; tensors are copied from their device at once."""
    tensors = {id(one): one for one in given if isinstance(one, Tensor)}
    values = dict(zip(tensors, read(list(tensors.values())), strict=True))
    return lambda one: values[id(one)] if isinstance(one, Tensor) else one


def _largest(values: Iterable[float]) -> float:
    """The maximum of ``values`` and 0."""
    return functools.reduce(_larger, values, 0.0)


def _larger(a: float, b: float) -> float:
    """The maximum, in which NaN is larger than any number: a NaN ratio must not count as a small one."""
    return b if not b <= a else a
