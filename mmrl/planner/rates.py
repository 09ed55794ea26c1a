"""How long operators take: on a device that was calibrated, or by a GPU's data sheet and stated shares of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mmrl.planner.calibration import Calibration
from mmrl.planner.gpus import Gpu
from mmrl.planner.operations import Call, Work

CALIBRATED = 1.22
"""An estimate on a calibrated machine is its middle, divided and multiplied by this."""
UNCALIBRATED = 1.7
"""The same by a data sheet."""
OF_PEAK = {"product": 0.78, "attention": 0.4, "convolution": 0.4}
"""Shares of a GPU's peak operations: of large products as an H100 reached them, of the others assumed."""
OF_BANDWIDTH = 0.85
TOKEN = 6e-4
"""Seconds of the host for a token of text beside the model's forward: assumed, as on a server's CPU."""
LAUNCH = {"forward": 24e-6, "graph": 28e-6, "backward": 20e-6}
"""Seconds of host time to start an operator on a GPU, by what it is part of: as the host of an H100 took (23 to 36)."""
VIEW = 1.5e-6
KERNEL = 2.5e-6
"""Seconds that a GPU's shortest kernel takes."""
_NEAR = 4


def seconds(work: Work, rates: Rates) -> float:
    """Seconds of operators that are called one after another."""
    host = sum(n * rates.host(call) for call, n in work.items())
    device = sum(n * rates.device(call) for call, n in work.items())
    return max(host, device) if rates.beside else host + device


@dataclass(frozen=True)
class Assumed:
    """By a data sheet. ``tf32``: float32 products use it; float32 convolutions do unless it is False."""

    gpu: Gpu
    tf32: bool | None = None
    calibrated: bool = False

    @property
    def name(self) -> str:
        return (
            f"shares of {self.gpu.name}'s rates: {OF_PEAK['product']:.0%} of the operations of products, "
            f"{OF_BANDWIDTH:.0%} of {self.gpu.bandwidth:,.0f} GB/s ({self.gpu.source}), "
            f"{1e6 * LAUNCH['forward']:.0f} us to start an operator"
        )

    @property
    def beside(self) -> bool:
        """Whether the device computes while the host starts what comes next."""
        return self.gpu.gib > 0

    @property
    def bandwidth(self) -> float:
        """Bytes a second that large tensors move with."""
        return OF_BANDWIDTH * 1e9 * self.gpu.bandwidth

    @property
    def token(self) -> float:
        """Seconds of the host to write a token of text, beside the model's forward."""
        return TOKEN

    def host(self, call: Call) -> float:
        """Seconds of the host that starts ``call``."""
        return VIEW if call.kind == "view" else LAUNCH[call.mode]

    def device(self, call: Call) -> float:
        """Seconds of the device that computes ``call``."""
        if call.kind == "view":
            return 0.0
        kind = call.kind.removesuffix("_backward")
        moved = call.nbytes / self.bandwidth
        if not call.flops:
            return max(moved, KERNEL)
        fast = self.tf32 if kind == "product" else self.tf32 is not False and kind == "convolution"
        rate = self.gpu.rate("tf32" if fast and call.dtype == "float32" else call.dtype)
        return max(call.flops / (OF_PEAK[kind] * rate), moved, KERNEL)


@dataclass(frozen=True)
class Calibrated:
    """By what ``mmrl doctor --calibrate`` measured here."""

    of: Calibration
    tf32: bool | None = None
    calibrated: bool = True
    _known: dict[Call, float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.of.device

    @property
    def beside(self) -> bool:
        return self.of.kind != "cpu"

    @property
    def bandwidth(self) -> float:
        return max((one.work, one.work / one.seconds) for one in self.of.timings if one.kind == "add")[1]

    @property
    def token(self) -> float:
        return self.of.over.token

    def _over(self, call: Call) -> float:
        return self.of.over.forward if call.mode == "forward" else self.of.over.train

    def host(self, call: Call) -> float:
        of = self.of.launches
        return self._over(call) * (of.view if call.kind == "view" else getattr(of, call.mode))

    def device(self, call: Call) -> float:
        if call.kind == "view":
            return 0.0
        if call not in self._known:
            self._known[call] = self._over(call) * self._seconds(call)
        return self._known[call]

    def _seconds(self, call: Call) -> float:
        kind = call.kind if call.flops else self._pass(call.kind)
        dtype = "tf32" if self.tf32 and kind == "product" and call.dtype == "float32" else call.dtype
        points = self._points.get((kind, self._dtype(kind, dtype)), [])
        work = call.flops or call.nbytes
        if not points or not work:
            return 0.0
        return work / rate_at(points, place(kind, call.sizes, work))

    def _pass(self, name: str) -> str:
        name = ALIKE.get(name.removesuffix("_"), name)
        return name if any(kind == name for kind, _ in self._points) else "add"

    def _dtype(self, kind: str, dtype: str) -> str:
        """The dtype itself where it was measured, else float32: integers and masks are copied as fast."""
        return dtype if (kind, dtype) in self._points else "float32"

    @cached_property
    def _points(self) -> Mapping[tuple[str, str], Sequence[tuple[tuple[float, ...], float]]]:
        found: dict[tuple[str, str], list[tuple[tuple[float, ...], float]]] = {}
        bare = self.of.launches.bare
        for one in self.of.timings:
            alone = max(one.seconds - bare, 0.1 * one.seconds)
            found.setdefault((one.kind, one.dtype), []).append((place(one.kind, one.sizes, one.work), one.work / alone))
        return found


Rates = Assumed | Calibrated

ALIKE = {
    "sub": "add",
    "div": "add",
    "_to_copy": "mul",
    "copy": "mul",
    "neg": "mul",
    "rsqrt": "pow",
    "sqrt": "pow",
    "sum": "mean",
    "var": "mean",
    "var_mean": "mean",
    "embedding": "index",
    "gather": "index",
    "index_select": "index",
    "stack": "cat",
    "_softmax": "_log_softmax",
    "tanh": "exp",
    "sigmoid": "exp",
    "log": "exp",
    "sin": "exp",
    "cos": "exp",
    "erf": "exp",
    "randn": "normal_",
    "normal": "normal_",
    "uniform": "normal_",
    "rand": "normal_",
}
"""Operators that take about as long for a byte as one that is measured."""


def place(kind: str, sizes: tuple[int, ...], work: float) -> tuple[float, ...]:
    """Where a call lies among the measured ones of its kind, in doublings."""
    if kind == "product":
        batch, *sides = sizes
        short, middle, long = (math.log2(max(1, n)) for n in sorted(sides))
        return short, middle, long + math.log2(max(1, batch))
    if kind.startswith("attention"):
        return (math.log2(max(1, sizes[1] * sizes[2])) / 2, math.log2(max(1, sizes[3])))
    if kind.startswith("convolution"):
        return math.log2(max(1, sizes[0])), math.log2(max(1, sizes[1]))
    return (math.log2(max(1.0, work)),)


def rate_at(points: Sequence[tuple[tuple[float, ...], float]], at: tuple[float, ...]) -> float:
    """The rate at a place: of the nearest measured ones, in logarithms, the nearer the more."""
    near = sorted((math.dist(of, at) ** 2, rate) for of, rate in points)[:_NEAR]
    if near[0][0] < 1e-9:
        return near[0][1]
    weights = [1 / distance**2 for distance, _ in near]
    return math.exp(sum(w * math.log(rate) for w, (_, rate) in zip(weights, near, strict=True)) / sum(weights))
