"""Balance work: predicted work of rows, their assignment to bins, and their packing into micro-batches.

Pure functions of numbers: equal inputs give equal results on every machine, so that controllers with the same numbers
decide the same without communication. Only ``fit`` uses a library whose last digits may differ between machines, so its
result is sent to all controllers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from mmrl.core.json_types import JsonObject, as_list, as_number, as_object

TERMS = ("attention", "text", "image", "frames", "response", "steps", "row")
"""The terms of a row's time: the square of its length, tokens by kind, denoising steps, and a constant per row."""
PRIOR = (1 / 6144, 1.0, 1.0, 1.0, 2.0, 1.0, 0.0)
"""Relative cost of each term before the first measurement. The ratio of attention to the rest of a transformer is that
of length to six times its width; a response is sampled and then trained on."""
QUADRATIC, LAUNCH = PRIOR[0], 512.0
"""A padded row of width ``L`` costs ``L + QUADRATIC * L**2``, and a micro-batch costs ``LAUNCH`` in addition to its
rows, in tokens. Both are fixed: with micro-batches that follow measured times no run could be repeated.
"""


@dataclass(frozen=True)
class Size:
    """The known or expected size of a row: tokens of its prompt by kind and of its response; denoising steps."""

    text: float = 0.0
    image: float = 0.0
    frames: float = 0.0
    response: float = 0.0
    steps: float = 0.0

    @property
    def prompt(self) -> float:
        return self.text + self.image + self.frames

    @property
    def terms(self) -> list[float]:
        """The values of ``TERMS``, in their order."""
        length = self.prompt + self.response
        return [length * length, self.text, self.image, self.frames, self.response, self.steps, 1.0]


# -- prediction --------------------------------------------------------------------------------------------------------


class Lengths:
    """Predicts the length of a prompt's responses: a moving average per prompt, if the prompt was seen before.

    For other prompts it is a linear fit to all groups by the length of the prompt: long questions tend to have long
    answers. Before the first group it is ``most``. ``decay``: weight of old lengths in a prompt's average; ``forget``:
    weight of old groups in the fit; ``kept``: the number of remembered prompts, the last seen.
    """

    def __init__(self, most: float, decay: float = 0.5, forget: float = 0.998, kept: int = 100_000) -> None:
        self.most, self.decay, self.forget, self.kept = most, decay, forget, kept
        self._average: dict[str, float] = {}
        self._sums = [0.0] * 5

    def expect(self, prompt: str, length: float) -> float:
        """Expected response tokens of ``prompt`` (its id), which has ``length`` tokens."""
        if prompt in self._average:
            return self._average[prompt]
        n, x, y, xx, xy = self._sums
        if not n:
            return self.most
        spread = n * xx - x * x
        slope = (n * xy - x * y) / spread if spread > 1e-6 * n * xx else 0.0
        return min(max(1.0, y / n + slope * (length - x / n)), self.most)

    def learn(self, prompt: str, length: float, response: float) -> None:
        """``response``: mean tokens of a group's responses. All controllers must learn in the same order."""
        before = self._average.pop(prompt, response)
        self._average[prompt] = self.decay * before + (1 - self.decay) * response
        if len(self._average) > self.kept:
            del self._average[next(iter(self._average))]
        new = (1.0, length, response, length * length, length * response)
        self._sums = [self.forget * old + value for old, value in zip(self._sums, new, strict=True)]

    def state(self) -> JsonObject:
        """The state for a checkpoint; ``load_state`` restores it to the last bit."""
        return {"average": dict(self._average), "sums": list(self._sums)}

    def load_state(self, state: JsonObject) -> None:
        self._average = {prompt: as_number(length) for prompt, length in as_object(state["average"]).items()}
        self._sums = [as_number(value) for value in as_list(state["sums"])]


class Workload:
    """Predicts the cost of rows: ``coefficients`` for ``TERMS``, in seconds after they are ``calibrated``.

    ``window``: the number of last measurements that count.
    """

    def __init__(self, window: int = 64) -> None:
        self.window = window
        self.coefficients = list(PRIOR)
        self.calibrated = False
        self._measured: list[tuple[list[float], float]] = []

    def cost(self, terms: Sequence[float]) -> float:
        """The cost of rows whose terms sum to ``terms``."""
        return sum(c * t for c, t in zip(self.coefficients, terms, strict=True))

    def learn(self, measured: Iterable[tuple[Sequence[float], float]]) -> None:
        """Add measurements: the summed terms of rows computed together, and their seconds."""
        self._measured += [(list(terms), seconds) for terms, seconds in measured]
        self._measured = self._measured[-self.window :]

    def fitted(self) -> list[float] | None:
        """Coefficients in seconds, fitted to the measurements; None without measurements."""
        if not self._measured:
            return None
        return fit([terms for terms, _ in self._measured], [seconds for _, seconds in self._measured])

    def adopt(self, coefficients: Sequence[float] | None) -> None:
        """Use coefficients of ``fitted``, from this controller or from the leader; None changes nothing."""
        if coefficients is not None:
            self.coefficients, self.calibrated = list(coefficients), True

    def state(self) -> JsonObject:
        """The state for a checkpoint; ``load_state`` restores it."""
        return {
            "coefficients": list(self.coefficients),
            "calibrated": self.calibrated,
            "measured": [[*one] for one in self._measured],
        }

    def load_state(self, state: JsonObject) -> None:
        self.coefficients = [as_number(value) for value in as_list(state["coefficients"])]
        self.calibrated = bool(state["calibrated"])
        rows = [as_list(row) for row in as_list(state["measured"])][-self.window :]
        self._measured = [([as_number(t) for t in as_list(terms)], as_number(seconds)) for terms, seconds in rows]


def fit(
    terms: Sequence[Sequence[float]], seconds: Sequence[float], prior: Sequence[float] = PRIOR, pull: float = 0.01
) -> list[float]:
    """Non-negative coefficients for which ``terms`` ``[n, k]`` times coefficients is closest to ``seconds`` ``[n]``.

    Least squares of relative errors, regularised toward ``prior`` (scaled to the seconds), for few measurements or
    terms that they do not separate; ``pull``: the weight of the prior relative to one measurement. A term that no row
    has keeps its scaled prior.
    """
    from scipy.optimize import lsq_linear  # scipy's nnls has aborted the process

    x, y, p = np.asarray(terms, float), np.asarray(seconds, float), np.asarray(prior, float)
    p = p * (y.sum() / max((x @ p).sum(), 1e-30))
    x = x / np.maximum(y, 1e-9)[:, None]
    size = np.sqrt((x * x).mean(0))
    seen = size > 1e-9 * size.max()
    x, scaled = x[:, seen] / size[seen], (p * size)[seen]  # columns of equal size, for a well-conditioned problem
    weight = np.sqrt(pull)
    wanted = np.concatenate([np.ones(len(y)), weight * scaled])
    solved = lsq_linear(np.vstack([x, weight * np.eye(x.shape[1])]), wanted, (0, np.inf), method="bvls").x
    found = p.copy()
    found[seen] = np.maximum(solved, 0) / size[seen]
    return found.tolist()


def residual(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """The sum of absolute errors divided by the sum of ``measured``."""
    errors = sum(abs(p - m) for p, m in zip(predicted, measured, strict=True))
    return errors / max(sum(measured), 1e-30)


def unevenness(loads: Sequence[float]) -> float:
    """The largest load divided by the mean; 1 is perfectly balanced."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean > 0 else 1.0


# -- assignment --------------------------------------------------------------------------------------------------------


def divide(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Items in ``bins``, whose sizes differ by at most 1: the better of ``greedy`` and ``karmarkar_karp``.

    Equal costs are assigned in turn. The items of each bin are ascending; no bin is empty if there are enough items.
    """
    both = [way(costs, bins, equal_size=True) for way in (greedy, karmarkar_karp)]
    return min(both, key=lambda found: max(loads(costs, found)))  # the first of equals


def loads(costs: Sequence[float], bins: Sequence[Sequence[int]]) -> list[float]:
    """The summed cost of each bin."""
    return [sum(costs[i] for i in items) for items in bins]


def greedy(costs: Sequence[float], bins: int, *, equal_size: bool = False) -> list[list[int]]:
    """Assign the most expensive first, each to the bin with the smallest load so far (LPT); ties by index.

    Without ``equal_size`` the largest load is at most 4/3 - 1/(3 bins) times the optimum (Graham 1969). With it, sizes
    differ by at most 1.
    """
    room, extra = divmod(len(costs), bins)
    found: list[list[int]] = [[] for _ in range(bins)]
    sums = [0.0] * bins
    for i in _by_descending_cost(costs):
        larger = sum(len(items) > room for items in found)
        open_ = [b for b in range(bins) if not equal_size or len(found[b]) < room + (larger < extra)]
        b = min(open_, key=lambda b: (sums[b], b))
        found[b].append(i)
        sums[b] += costs[i]
    return [sorted(items) for items in found]


def karmarkar_karp(costs: Sequence[float], bins: int, *, equal_size: bool = False) -> list[list[int]]:
    """The largest differencing method (Karmarkar and Karp 1982): partial partitions whose bins differ most are merged
    first, the fullest bin of one with the emptiest of the other; ties by index.

    With ``equal_size`` sizes differ by at most 1.
    """
    order: list[int | None] = [*_by_descending_cost(costs)]
    if equal_size:
        order += [None] * (-len(order) % bins)  # dummy items, each in a different bin
        parts = [order[n : n + bins] for n in range(0, len(order), bins)]
    else:
        parts = [[i, *[None] * (bins - 1)] for i in order]
    heap = []
    for serial, part in enumerate(parts):
        division = [(0.0, []) if i is None else (float(costs[i]), [i]) for i in part]
        heap.append((division[-1][0] - division[0][0], serial, division))
    heapq.heapify(heap)
    for serial in range(len(parts), 2 * len(parts) - 1):
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(one, reversed(other), strict=True)
        division = sorted(((a + b, i + j) for (a, i), (b, j) in pairs), key=lambda bin_: -bin_[0])
        heapq.heappush(heap, (division[-1][0] - division[0][0], serial, division))
    found = [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(bins)]
    return sorted(found, key=lambda items: items or [len(costs)])


def _by_descending_cost(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda i: (-costs[i], i))


# -- packing -----------------------------------------------------------------------------------------------------------


def pack(
    sizes: Sequence[Sequence[int]],
    most: int,
    tokens: int | None = None,
    quadratic: float = QUADRATIC,
    launch: float = LAUNCH,
) -> list[list[int]]:
    """Divide rows into micro-batches of similar length, with the smallest total cost for rows sorted by length.

    ``sizes`` ``[n, parts]``: tokens of each part of a row; every part is padded to the longest in its micro-batch, and
    a row's width ``L`` is their sum (prompts and responses are padded separately). ``k`` rows cost
    ``k * (L + quadratic * L**2) + launch``. A micro-batch has at most ``most`` rows, and at most ``tokens`` tokens with
    padding; a longer row is a micro-batch by itself. Rows of equal size keep their order, ``most`` per micro-batch.

    Dynamic programming over the ends of micro-batches: they are contiguous in the sorted order, so the best division of
    the first ``n`` rows is the best division of fewer rows plus a last micro-batch.
    """
    if not sizes:
        return []
    rows = np.asarray(sizes, dtype=np.int64).reshape(len(sizes), -1)
    order = np.argsort(rows.sum(1), kind="stable")
    if len(rows) and (rows == rows[0]).all():
        most = max(1, min(most, tokens // max(1, int(rows[0].sum())))) if tokens is not None else most
        return [order[n : n + most].tolist() for n in range(0, len(rows), most)]
    rows = rows[order]
    best, begins = np.zeros(len(rows) + 1), [0] * (len(rows) + 1)
    counts = np.arange(1, most + 1)
    for end in range(1, len(rows) + 1):
        first = max(0, end - most)
        width = np.maximum.accumulate(rows[first:end][::-1]).sum(1).astype(float)  # widths of the last 1, 2, ... rows
        n = counts[: len(width)]
        cost = best[first:end][::-1] + n * (width + quadratic * width * width) + launch
        if tokens is not None:
            cost[1:][(n * width)[1:] > tokens] = np.inf
        taken = len(cost) - int(np.argmin(cost[::-1]))  # the most rows among equal costs
        best[end], begins[end] = cost[taken - 1], end - taken
    found, end = [], len(rows)
    while end:
        found.append(order[begins[end] : end].tolist())
        end = begins[end]
    return found[::-1]


WIDTHS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""The widths of lines that ``lines`` tries, by the longest row."""


def lines(lengths: Sequence[int], *, flat: bool) -> tuple[int, list[list[int]]]:
    """Whole rows of ``lengths`` tokens behind one another in lines of one width: the width, and the rows of each line.

    ``flat``: one line, for kernels of attention that compute nothing between rows. Others compute a line as one row:
    each of ``WIDTHS`` is filled from the longest row on (first fit), and the cheapest by the cost of ``pack`` is taken.
    """
    if flat:
        return sum(lengths), [[*range(len(lengths))]]
    order = _by_descending_cost(lengths)
    found = [_filled(lengths, order, int(lengths[order[0]] * wide)) for wide in WIDTHS]
    return min(found, key=lambda one: len(one[1]) * (one[0] + QUADRATIC * one[0] * one[0]))


def _filled(lengths: Sequence[int], order: Sequence[int], room: int) -> tuple[int, list[list[int]]]:
    made, used = list[list[int]](), list[int]()
    for i in order:
        n = next((n for n, tokens in enumerate(used) if tokens + lengths[i] <= room), len(made))
        if n == len(made):
            made.append([])
            used.append(0)
        made[n].append(i)
        used[n] += lengths[i]
    return max(used), made


def line_tokens(lengths: Sequence[int], *, flat: bool) -> int:
    """Tokens of ``lines``, padding included."""
    width, found = lines(lengths, flat=flat)
    return width * len(found)


def pack_lines(lengths: Sequence[int], most: int, tokens: int | None, *, flat: bool) -> list[list[int]]:
    """Divide rows into micro-batches for ``lines``, from the longest row on: of at most ``most`` rows, and of at most
    ``tokens`` tokens with padding; a longer row is a micro-batch by itself. The rows of each are ascending."""
    order = _by_descending_cost(lengths)
    found, begin = list[list[int]](), 0
    while begin < len(order):
        part = order[begin : begin + most]
        if tokens is not None:
            fits = [total for total in accumulate(lengths[i] for i in part) if total <= tokens]
            part = part[: max(1, len(fits))]
            while len(part) > 1 and line_tokens([lengths[i] for i in part], flat=flat) > tokens:
                part.pop()
        found.append(sorted(part))
        begin += len(part)
    return found


def padded(sizes: Sequence[Sequence[int]]) -> int:
    """Tokens of a micro-batch of rows with these parts, padding included."""
    return len(sizes) * sum(max(part) for part in zip(*sizes, strict=True))


def packing_cost(
    sizes: Sequence[Sequence[int]],
    micro_batches: Iterable[Sequence[int]],
    quadratic: float = QUADRATIC,
    launch: float = LAUNCH,
) -> float:
    """The cost that ``pack`` minimises, for any division of the rows into ``micro_batches``."""
    total = 0.0
    for index in micro_batches:
        width = padded([sizes[i] for i in index]) / len(index)
        total += len(index) * (width + quadratic * width * width) + launch
    return total
