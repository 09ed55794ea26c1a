"""Simulate a run's steps with every placement (``mmrl simulate``).

Controllers synchronise once per step, to train; before that each samples and judges its own share. The scheduler and
the policies are those of a real run (``mmrl.placement``); only time and work are simulated. docs/placement.md lists the
assumptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from mmrl.config.placement import Placement
from mmrl.placement import simulated_moving, what_if
from mmrl.placement.adaptive import Decision, Split, decide, opening, splits, starting
from mmrl.placement.simulated_ahead import SimulatedAhead
from mmrl.placement.simulated_devices import MicroBatch, SimulatedDevices, SimulatedTime
from mmrl.placement.step_records import summed
from mmrl.planner.simulator.trace import Trace, Work


@dataclass(frozen=True)
class Cluster:
    """``controllers`` with ``devices`` each. ``slow``: the devices of the first controller take so many times as long
    to sample and to judge as the others'. ``settings``: the recipe's section ``placement``; each placement has its own
    roles in it."""

    controllers: int
    devices: int
    slow: float = 1.0
    settings: Placement = field(default_factory=Placement)

    @property
    def total(self) -> int:
        return self.controllers * self.devices


@dataclass
class Outcome:
    """The result of a placement on a trace; lists have an entry for every step."""

    name: str
    devices: int
    steps: list[float] = field(default_factory=list)
    """Seconds of the step."""
    generate: list[float] = field(default_factory=list)
    """Seconds of the generate phase of the slowest controller; empty for disaggregated placements."""
    work: float = 0.0
    """Device-seconds of sampling, judging and training."""
    apart: float = 0.0
    """Device-seconds in which controllers waited for the slowest one."""
    moves: list[int] = field(default_factory=list)
    """Number of role switches of devices within the step."""
    moved: list[int] = field(default_factory=list)
    """Number of micro-batches that another controller took."""
    splits: list[Split] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(self.steps)

    @property
    def idle(self) -> float:
        """Share of all device-seconds spent without work: waiting and switching."""
        return 1 - self.work / (self.seconds * self.devices)

    @property
    def changes(self) -> int:
        """How often the split changed between steps."""
        return sum(a != b for a, b in zip(self.splits, self.splits[1:], strict=False))


def device_seconds(work: Work, cluster: Cluster) -> float:
    """Device-seconds of a step: sampling, judging and training."""
    batches = [batch for rounds in work.shares for batches in rounds for batch in batches]
    return sum(batch.sampling + batch.judging for batch in batches) + work.train * cluster.total


def bound(trace: Trace, cluster: Cluster) -> list[float]:
    """A lower bound on the seconds of every step: all devices share its work without gaps.

    It is the step's device-seconds divided by the devices, or its longest chain (the longest micro-batch of each round
    of a controller, or what its rewards outside of the devices take) if that is longer, plus training. No on-policy
    placement can be faster.
    """
    found = []
    for work in trace.steps:
        even = device_seconds(work, cluster) / cluster.total - work.train
        longest = max(sum(map(_longest, rounds)) for rounds in work.shares)
        found.append(max(even, longest) + work.train)
    return found


def _longest(batches: Sequence[MicroBatch]) -> float:
    """The least seconds of a round: its longest micro-batch, or the calls of a reward outside of the devices."""
    found = [b.sampling + max([b.judging, *(call.seconds / call.requests for call in b.calls)]) for b in batches]
    first = min((b.sampling for b in batches if b.calls), default=0.0)
    of: dict[str, float] = {}
    for call in (call for b in batches for call in b.calls):
        of[call.reward] = of.get(call.reward, 0.0) + call.seconds / call.at_once
    return max([*found, first + max(of.values(), default=0.0)])


def placed(trace: Trace, cluster: Cluster, settings: Placement, name: str, *, prompts_move: bool = False) -> Outcome:
    """The steps of a run whose recipe has this section ``placement``, with the scheduler and the policy of the run.

    Each controller has its own devices; they wait for the slowest controller before they train. ``prompts_move``: with
    ``train.balance: moving``, between controllers.
    """
    out, time = Outcome(name, cluster.total), SimulatedTime()
    state = starting(settings, cluster.devices)
    slows = [cluster.slow] + [1.0] * (cluster.controllers - 1)
    controllers = [SimulatedDevices(cluster.devices, trace.price, time, slow=slow, settings=settings) for slow in slows]
    for work in trace.steps:
        split, moves = opening(state, judged=True)
        if prompts_move:
            out.moved.append(simulated_moving.step(controllers, work.shares, split, moves))
        else:
            for devices, rounds in zip(controllers, work.shares, strict=True):
                devices.step(rounds, split, moves)
        found = [devices.scheduler.numbers() for devices in controllers]
        phases = [numbers["scored"] for numbers in found]
        longest, numbers = max(phases), summed(found)
        out.generate.append(longest)
        out.steps.append(longest + work.train)
        out.work += device_seconds(work, cluster)
        out.apart += sum(longest - phase for phase in phases) * cluster.devices
        out.moves.append(int(numbers["moves"]) if moves == "worth" else 0)
        out.splits.append(state.split)
        if settings.follows:
            tried = [what_if.tried(devices.scheduler, state) for devices in controllers]
            state, decision = decide(state, what_if.slowest(tried))
            out.decisions.append(decision)
    return out


def static(trace: Trace, cluster: Cluster, split: Split) -> Outcome:
    """``colocate`` (judge 0), or ``partial`` with one split for the whole run."""
    if not split.judge:
        return placed(trace, cluster, cluster.settings.with_roles(), "colocate")
    settings = cluster.settings.with_roles(type="partial", judges=split.judge)
    return placed(trace, cluster, settings, f"partial {split.rollout}+{split.judge}")


def moving(trace: Trace, cluster: Cluster, split: Split) -> Outcome:
    """Every step begins with the same split, and devices move within it; ``greedy`` where all sample first."""
    name = f"{split.rollout}+{split.judge} with moves" if split.judge else "greedy"
    settings = cluster.settings.with_roles(type="greedy", judges=split.judge or None)
    return placed(trace, cluster, settings, name)


def adaptive(trace: Trace, cluster: Cluster, *, moves: bool = True, prompts_move: bool = False) -> Outcome:
    """The split follows the load between steps; with ``moves``, devices also switch roles within a step, with
    ``prompts_move`` prompts move between controllers."""
    name = ("adaptive" if moves else "adaptive, split alone") + ", prompts move" * prompts_move
    settings = cluster.settings.with_roles(type="adaptive", inside=moves)
    return placed(trace, cluster, settings, name, prompts_move=prompts_move)


def disaggregated(
    trace: Trace, cluster: Cluster, train: int, judge: int, staleness: int, *, lend: bool = False
) -> Outcome:
    """Fixed roles: in every controller ``train`` devices train, ``judge`` judge and the rest sample. ``lend``: devices
    that wait to train sample and judge meanwhile."""
    settings = cluster.settings.with_roles(type="disaggregated", trainers=train, judges=judge or None, lend=lend)
    name = f"disaggregated {cluster.devices - train - judge}+{judge}+{train}"
    return sampled_ahead(trace, cluster, settings, staleness, f"{name}, lent" if lend else name, judged=judge > 0)


def three_roles(
    trace: Trace, cluster: Cluster, train: int, staleness: int, how: Literal["greedy", "adaptive"], *, lend: bool = True
) -> Outcome:
    """``disaggregated``, but the devices that do not train move between sampling and judging (``split``)."""
    roles = {"trainers": train, "split": how, "staleness": staleness, "lend": lend}
    settings = cluster.settings.with_roles(type="disaggregated", **roles)
    name = f"three roles {cluster.devices - train}+{train}, {how}"
    return sampled_ahead(trace, cluster, settings, staleness, name if lend else f"{name}, not lent")


def sampled_ahead(
    trace: Trace, cluster: Cluster, settings: Placement, staleness: int, name: str, *, judged: bool = True
) -> Outcome:
    """The steps of a disaggregated placement. Sampling of a step starts when the weights are at most ``staleness``
    versions behind. Training time is inversely proportional to its devices, and new weights arrive without delay.
    ``judged``: whether judges are needed."""
    out, state = Outcome(name, cluster.total), starting(settings, cluster.devices, judged=judged)
    trainers, time = settings.training(cluster.devices), SimulatedTime()
    training = [work.train * cluster.devices / trainers for work in trace.steps]
    price = trace.price if settings.lend or settings.split != "fixed" else 0.0
    controllers = [
        SimulatedDevices(cluster.devices, price, time, settings=settings) for _ in range(cluster.controllers)
    ]
    for devices in controllers:
        devices.apart(state.split, state.moves)

    def trained(step: int) -> None:
        nonlocal state
        out.splits.append(state.split)
        if settings.follows:
            work = [devices.scheduler.work_of(step) for devices in controllers]
            tried = [
                what_if.tried_ahead(devices.scheduler, state, done, training[step])
                for devices, done in zip(controllers, work, strict=True)
            ]
            state, decision = decide(state, what_if.slowest(tried))
            out.decisions.append(decision)
        if settings.split != "fixed":
            for devices in controllers:
                devices.apart(state.split, state.moves)

    shares = [work.shares for work in trace.steps]
    run = SimulatedAhead(controllers, shares, training, staleness, trained, lend=settings.lend)
    ends = [0.0, *run.trained()]
    out.steps = [after - before for before, after in pairwise(ends)]
    out.work = sum(device_seconds(work, cluster) for work in trace.steps)
    out.moves = [after - before for before, after in pairwise([0, *run.moves])]
    return out


def best_disaggregated(trace: Trace, cluster: Cluster, staleness: int = 1, *, lend: bool = False) -> Outcome | None:
    """The fastest fixed roles, without judges if nothing is judged; None if a controller has too few devices."""
    judged = any(b.judging for work in trace.steps for rounds in work.shares for batches in rounds for b in batches)
    tried = [
        disaggregated(trace, cluster, train, judge, staleness, lend=lend)
        for judge in (range(1, cluster.devices - 1) if judged else (0,))
        for train in range(1, cluster.devices - judge)
    ]
    return min(tried, key=lambda outcome: outcome.seconds, default=None)


def best_three_roles(trace: Trace, cluster: Cluster, staleness: int = 1, *, lend: bool = True) -> list[Outcome]:
    """A greedy split beside the number of devices that train with which it is fastest, and an adaptive split beside as
    many."""
    tried = [three_roles(trace, cluster, n, staleness, "greedy", lend=lend) for n in range(1, cluster.devices)]
    greedy = min(tried, key=lambda outcome: outcome.seconds)
    train = 1 + tried.index(greedy)
    return [greedy, three_roles(trace, cluster, train, staleness, "adaptive", lend=lend)]


@dataclass
class Comparison:
    """Every placement on one trace; ``bound``: the lower bound on the seconds of all steps, on-policy."""

    bound: float
    outcomes: list[Outcome]
    best: Outcome
    """The best static placement, which is also in ``outcomes``."""


def compare(trace: Trace, cluster: Cluster, staleness: int = 1) -> Comparison:
    """Compare colocate, the best partial split, the best disaggregated placement (with three devices or more) without
    and with lending, lent ones with a greedy and an adaptive split, greedy, the best split with moves within a step,
    and adaptive without and with such moves, and, of several controllers, with prompts that move between them.

    Raises ``ValueError`` if a controller has one device.
    """
    if cluster.devices < 2:
        raise ValueError("a controller of one device leaves none beside a judge")
    colocate, *partial = [static(trace, cluster, split) for split in splits(cluster.devices)]
    fastest = min(partial, key=lambda outcome: outcome.seconds)
    apart = [best_disaggregated(trace, cluster, staleness, lend=lend) for lend in (False, True)]
    greedy, *others = [moving(trace, cluster, split) for split in splits(cluster.devices)]
    outcomes = [
        colocate,
        fastest,
        *(one for one in apart if one),
        *best_three_roles(trace, cluster, staleness),
        greedy,
        min(others, key=lambda outcome: outcome.seconds),
        adaptive(trace, cluster, moves=False),
        *([adaptive(trace, cluster, prompts_move=True)] if cluster.controllers > 1 else []),
        adaptive(trace, cluster),
    ]
    best = min(colocate, fastest, key=lambda outcome: outcome.seconds)
    return Comparison(sum(bound(trace, cluster)), outcomes, best)
