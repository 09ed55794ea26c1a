"""Metrics of one step, gathered slice by slice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from mmrl.algorithms.objective import Loss
from mmrl.errors import UserError

FIRST_RATIO_TOLERANCE = {"float32": 1e-5, "half": 5e-3}
"""Largest |ratio - 1| before the first update of a step (DESIGN 9). In half precision the same code on the same shapes
is still exact, but an accelerator may choose its kernels anew."""


class Tally:
    """Sums become means over an update's entries, maxima stay maxima; values set several times are averaged."""

    def __init__(self) -> None:
        self._means: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._pairs: defaultdict[str, list[tuple[Tensor, float]]] = defaultdict(list)
        self._updates = 0
        self._maxima: dict[str, float] = {}
        self._first: float | None = None
        self._values: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, loss: Loss, total: float, *, first_update: bool) -> None:
        """Count a slice's sums, and remember its ratio where no weight has moved yet."""
        for name, value in loss.sums.items():
            self._means[name].append(value / total)
        for name, value in loss.maxima.items():
            self._maxima[name] = _larger(self._maxima.get(name, 0.0), value.item())
        if first_update and "policy/ratio_max_dev" in loss.maxima:
            self._first = _larger(self._first or 0.0, loss.maxima["policy/ratio_max_dev"].item())

    def gather(self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor], count: float) -> None:
        """Of a slice with ``count`` tokens: ``sums`` become means over the step's tokens, ``maxima`` stay maxima."""
        for name, value in sums.items():
            self._pairs[name].append((value, count))
        for name, value in maxima.items():
            self._maxima[name] = _larger(self._maxima.get(name, 0.0), value.item())

    def set(self, values: Mapping[str, float]) -> None:
        """Values of the step; of several updates' (gradient norms) the mean is shown."""
        for name, value in values.items():
            self._values[name].append(value)

    def extend(self, name: str, values: Tensor) -> None:
        """Values per sample that were met inside the update; their mean is shown."""
        self._values[name].extend(values.double().tolist())

    def end_update(self) -> None:
        self._updates += 1

    def check_first_ratio(self, *, exact: bool) -> None:
        """Raise ``UserError`` where sampling and replay disagree before any weight has moved."""
        if self._first is None:
            return
        tolerance = FIRST_RATIO_TOLERANCE["float32" if exact else "half"]
        if not self._first <= tolerance:
            raise UserError(
                f"before the first update the largest |ratio - 1| is {self._first:.3g}, above {tolerance:g}: sampling "
                "and replay do not compute the same thing, and clipping at such differences trains on noise. Use the "
                "same batch shapes (leave sampling.batch_size out), the same attention, no dropout, and torch.compile "
                "on both sides or neither."
            )

    def means(self) -> dict[str, float]:
        out = {name: sum(v.item() for v in values) / max(1, self._updates) for name, values in self._means.items()}
        for name, pairs in self._pairs.items():
            count = sum(n for _, n in pairs)
            out[name] = sum(total.item() for total, _ in pairs) / count if count else 0.0
        out |= {name: sum(values) / len(values) for name, values in self._values.items()}
        if self._first is not None:
            out["policy/first_ratio_max_dev"] = self._first
        return out | self._maxima


def _larger(a: float, b: float) -> float:
    """The maximum, where NaN is larger than any number: a ratio that is no number must not pass for a small one."""
    return b if not b <= a else a
