"""Generate the work of a run's steps from a seed. ``trace_from_run`` reads it from a recorded run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mmrl.placement.simulated_devices import MicroBatch, Rounds
from mmrl.placement.tasks import Call


@dataclass(frozen=True)
class Work:
    """A step's work: each controller's rounds, and ``train``, the seconds of training on all devices together."""

    shares: list[Rounds]
    train: float


@dataclass(frozen=True)
class Trace:
    """The work of all steps; ``price``: seconds of a device's role switch."""

    steps: list[Work]
    price: float
    source: str


@dataclass(frozen=True)
class Load:
    """A synthetic load. ``sample`` is the mean seconds of a micro-batch; all other values are relative to it.

    ``judge``: device-seconds of judging per device-second of sampling, as a function of the run's progress (0..1).
    ``tail``: sigma of the log-normal sampling time; ``pareto``: shape of a Pareto distribution instead (heavy-tailed
    below 2), cut at 30 times the minimum. ``judge_tail``: sigma of judging. ``again``: the share of micro-batches to
    replace because their rewards are all equal, in the first and in the last step; ``ahead``: the first round tries as
    many extra micro-batches as the previous step would have needed. ``train``: training's share of the device-seconds
    of the first step. ``price``: of a role switch, in mean micro-batches of sampling.
    """

    about: str
    judge: Callable[[float], float]
    sample: float = 20.0
    tail: float = 0.4
    pareto: float | None = None
    judge_tail: float = 0.2
    again: tuple[float, float] = (0.0, 0.0)
    ahead: bool = True
    train: float = 0.25
    price: float = 1.0


LOADS: dict[str, Load] = {
    "steady": Load("judging takes half of what sampling takes, always", lambda at: 0.5),
    "judge-heavy": Load("judging takes three times what sampling takes", lambda at: 3.0),
    "drifting": Load(
        "judging grows from a quarter of sampling to four times; replaced groups from 10 % to 40 %",
        lambda at: 4.0 ** (2 * at - 1),
        again=(0.1, 0.4),
    ),
    "shifting": Load(
        "half-way judging jumps from a third of sampling to three times", lambda at: 3.0 if at >= 0.5 else 1 / 3
    ),
    "tailed": Load("responses with a heavy tail (Pareto 1.5), as much judging as sampling", lambda at: 1.0, pareto=1.5),
}


MOST_ROUNDS = 4
"""Largest number of sampling rounds in a step; groups that are still missing then are trained on as they are."""


@dataclass(frozen=True)
class HttpJudge:
    """A judge behind HTTP, which is asked about each sample: ``seconds`` of a request in the mean, a micro-batch's
    ``requests``, and how many a controller makes at the same time."""

    seconds: float
    requests: int
    at_once: int


def synthetic(
    load: Load,
    steps: int,
    controllers: int,
    devices: int,
    micro_batches: int,
    seed: int = 0,
    asked: HttpJudge | None = None,
) -> Trace:
    """``steps`` steps of ``micro_batches`` each, divided among controllers in turn; ``devices``: of all controllers.
    ``asked``: a judge outside of the devices, beside the load's."""
    rng, others = np.random.default_rng(seed), np.random.default_rng([seed, 1])  # the devices' work stays the same
    train = load.sample * micro_batches * (1 + load.judge(0.0)) / devices * load.train / (1 - load.train)
    made, tried = [], 1.0
    for step in range(steps):
        at = step / max(steps - 1, 1)
        again = load.again[0] + (load.again[1] - load.again[0]) * at
        shares = []
        for rank in range(controllers):
            wanted = len(range(rank, micro_batches, controllers))
            shares.append(_rounds(load, wanted, tried, again, load.judge(at), rng))
        tried = 1 / (1 - again) if load.ahead else 1.0
        made.append(Work(shares if asked is None else _asked(shares, asked, load.judge_tail, others), train))
    return Trace(made, load.price * load.sample, load.about)


def _rounds(load: Load, wanted: int, tried: float, again: float, judge: float, rng: np.random.Generator) -> Rounds:
    rounds: Rounds = []
    while wanted > 0 and len(rounds) < MOST_ROUNDS:
        count = math.ceil(wanted * tried)
        rounds.append([_micro_batch(load, judge, rng) for _ in range(count)])
        wanted -= int((rng.random(count) >= again).sum())
    return rounds


def _asked(shares: list[Rounds], asked: HttpJudge, tail: float, rng: np.random.Generator) -> list[Rounds]:
    """The micro-batches with their calls of a judge outside of the devices."""

    def call() -> Call:
        seconds = asked.seconds * sum(_normal(tail, rng) for _ in range(asked.requests))
        return Call("judge", asked.requests, seconds, asked.at_once)

    return [[[batch._replace(calls=(call(),)) for batch in one] for one in rounds] for rounds in shares]


def _micro_batch(load: Load, judge: float, rng: np.random.Generator) -> MicroBatch:
    seconds = load.sample * (_normal(load.tail, rng) if load.pareto is None else _pareto(load.pareto, rng))
    return MicroBatch(seconds, load.sample * judge * _normal(load.judge_tail, rng))


def _normal(sigma: float, rng: np.random.Generator) -> float:
    """Log-normal of mean 1."""
    return float(rng.lognormal(-sigma * sigma / 2, sigma))


def _pareto(shape: float, rng: np.random.Generator, most: float = 30.0) -> float:
    """Pareto between 1 and ``most``, divided by its mean."""
    low = most**-shape
    drawn = (1 - rng.random() * (1 - low)) ** (-1 / shape)
    mean = shape / (shape - 1) * (1 - most ** (1 - shape)) / (1 - low)
    return float(drawn / mean)
