"""Loads that change, for the tables of placement: those of ``mmrl simulate``, and harder ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mmrl.placement.simulated_devices import MicroBatch
from mmrl.planner.simulator.simulate import Cluster
from mmrl.planner.simulator.trace import LOADS, Load, Trace, Work, synthetic

MICRO_BATCHES = 8
"""Of a device in a step."""


def made(load: Load, price: float, cluster: Cluster, steps: int, seed: int, each: int = MICRO_BATCHES) -> Trace:
    """The trace of a load whose ``price`` is a share of the first step's even generate phase. ``each``: the
    micro-batches of a device in a step, which make the same work together."""
    load = load if each == MICRO_BATCHES else replace(load, sample=load.sample * MICRO_BATCHES / each)
    count = cluster.total * each
    trace = synthetic(load, steps, cluster.controllers, cluster.total, count, seed)
    return replace(trace, price=price * load.sample * each * (1 + load.judge(0.0)))


def _judging(trace: Trace, times: Callable[[int], float]) -> Trace:
    """The same with the judging of step ``n`` multiplied by ``times(n)``."""

    def work(step: int, work: Work) -> Work:
        shares = [
            [[MicroBatch(b.sampling, b.judging * times(step)) for b in batches] for batches in rounds]
            for rounds in work.shares
        ]
        return Work(shares, work.train)

    return replace(trace, steps=[work(n, one) for n, one in enumerate(trace.steps)])


def _growing(trace: Trace, seed: int) -> Trace:
    """Responses that grow to six times their length, with a tail that grows from none to heavy."""
    rng, last = np.random.default_rng(seed + 1), max(len(trace.steps) - 1, 1)

    def work(step: int, work: Work) -> Work:
        sigma = 1.2 * step / last
        longer = 1 + 5 * step / last

        def seconds(sampling: float) -> float:
            return sampling * longer * float(rng.lognormal(-sigma * sigma / 2, sigma))

        shares = [
            [[MicroBatch(seconds(b.sampling), b.judging) for b in batches] for batches in rounds]
            for rounds in work.shares
        ]
        return Work(shares, work.train)

    return replace(trace, steps=[work(n, one) for n, one in enumerate(trace.steps)])


def trace_of(name: str, price: float, cluster: Cluster, steps: int, seed: int, each: int = MICRO_BATCHES) -> Trace:
    """The trace of a load of ``NAMES``; ``each`` as in ``made``."""
    if name in LOADS:
        return made(LOADS[name], price, cluster, steps, seed, each)
    if name == "growing":
        return _growing(made(Load("", lambda at: 0.5, tail=0.1), price, cluster, steps, seed, each), seed)
    if name == "constant":
        return made(Load("", lambda at: 2.0, tail=0.0, judge_tail=0.6), price, cluster, steps, seed, each)
    even = made(Load("", lambda at: 0.5), price, cluster, steps, seed, each)
    middle = range(steps // 2, steps // 2 + 3)
    times: dict[str, Callable[[int], float]] = {
        "slow judge": lambda step: 12.0 if step in middle else 1.0,
        "no judge": lambda step: 0.0 if step in middle else 1.0,
        "alternating": lambda step: 4.0 if step % 2 else 0.4,
        "in threes": lambda step: 4.0 if step // 3 % 2 else 0.4,
        "random judge": lambda step: float(np.random.default_rng((seed, step)).choice((0.3, 1.0, 6.0))),
    }
    return _judging(even, times[name])


NAMES = (*LOADS, "growing", "constant", "slow judge", "no judge", "alternating", "in threes", "random judge")
