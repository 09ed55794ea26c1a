"""Simulate a run's steps with every placement (``mmrl simulate``).

Controllers synchronise once per step, to train; before that each samples and judges its own share. ``adaptive`` calls
``mmrl.placement.adaptive``, the functions of a real run. docs/placement.md lists the assumptions.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmrl.placement.adaptive import Decision, Measured, Split, begin, decide, splits
from mmrl.simulator.generate_phase import Expectations, Generate, Phase, Rounds
from mmrl.simulator.trace import Trace, Work


@dataclass(frozen=True)
class Cluster:
    """``controllers`` with ``devices`` each; ``replica``: devices of one judge replica."""

    controllers: int
    devices: int
    replica: int = 1

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
    return sum(r + j * cluster.replica for r, j in batches) + work.train * cluster.total


def bound(trace: Trace, cluster: Cluster) -> list[float]:
    """A lower bound on the seconds of every step: all devices share its work without gaps.

    It is the step's device-seconds divided by the devices, or its longest chain (the longest micro-batch of each round
    of a controller) if that is longer, plus training. No on-policy placement can be faster.
    """
    found = []
    for work in trace.steps:
        even = device_seconds(work, cluster) / cluster.total - work.train
        longest = max(sum(max(r + j for r, j in batches) for batches in rounds) for rounds in work.shares)
        found.append(max(even, longest) + work.train)
    return found


def static(trace: Trace, cluster: Cluster, split: Split) -> Outcome:
    """``colocate`` (judge 0), or ``partial`` with one split for the whole run."""
    name = f"partial {split.rollout}+{split.judge}" if split.judge else "colocate"
    out = Outcome(name, cluster.total)
    for work in trace.steps:
        _generate(out, work, cluster, Generate(split, trace.price, cluster.replica))
    return out


def best_static(trace: Trace, cluster: Cluster) -> Outcome:
    """The fastest static split, including colocate: the best choice if the whole run was known beforehand."""
    tried = [static(trace, cluster, split) for split in splits(cluster.devices, cluster.replica)]
    return min(tried, key=lambda outcome: outcome.seconds)


def adaptive(trace: Trace, cluster: Cluster, *, moves: bool = True) -> Outcome:
    """The split follows the load between steps; with ``moves``, devices also switch roles within a step."""
    out = Outcome("adaptive" if moves else "adaptive, split alone", cluster.total)
    state, expectations = begin(cluster.devices, cluster.replica, moves=moves), None
    for work in trace.steps:
        phase = Generate(state.split, trace.price, cluster.replica, moves, expectations)
        phases = _generate(out, work, cluster, phase)
        expectations = Expectations.of(phases) or expectations
        state, decision = decide(state, measured(phases, cluster, trace.price))
        out.decisions.append(decision)
    return out


def measured(phases: Sequence[Phase], cluster: Cluster, price: float) -> Measured:
    """The measurements that a real run would take from these phases, one for each controller."""
    return Measured(
        rollout_busy=sum(phase.rollout_busy for phase in phases),
        judge_busy=sum(phase.judge_busy for phase in phases),
        rollout_done=max(phase.rollout_done for phase in phases),
        judge_done=max(phase.judge_done for phase in phases),
        devices=cluster.total,
        price=price,
        micro_batches=sum(phase.judged for phase in phases),
    )


def _generate(out: Outcome, work: Work, cluster: Cluster, generate: Generate) -> list[Phase]:
    phases = [generate.run(share) for share in work.shares]
    longest = max(phase.seconds for phase in phases)
    out.generate.append(longest)
    out.steps.append(longest + work.train)
    out.work += device_seconds(work, cluster)
    out.apart += sum(longest - phase.seconds for phase in phases) * cluster.devices
    out.moves.append(sum(phase.moves for phase in phases))
    out.splits.append(generate.split)
    return phases


def disaggregated(trace: Trace, cluster: Cluster, train: int, judge: int, staleness: int) -> Outcome:
    """Fixed roles: in every controller ``train`` devices train, ``judge`` judge and the rest sample. Sampling of a step
    starts when the weights are at most ``staleness`` versions behind.

    Training time is inversely proportional to its devices. Roles never change, and new weights arrive without delay.
    """
    rollout = cluster.devices - train - judge
    out = Outcome(f"disaggregated {rollout}+{judge}+{train}", cluster.total)
    lanes = [
        (_Lanes(rollout), _Lanes(judge // cluster.replica)) for _ in range(cluster.controllers)
    ]  # when each device is free again
    trained: list[float] = []
    for step, work in enumerate(trace.steps):
        begins = trained[step - staleness - 1] if step > staleness else 0.0
        judged = max(_pass(share, *lane, begins) for share, lane in zip(work.shares, lanes, strict=True))
        ends = max(judged, trained[-1] if trained else 0.0) + work.train * cluster.devices / train
        out.steps.append(ends - (trained[-1] if trained else 0.0))
        trained.append(ends)
        out.work += device_seconds(work, cluster)
        out.moves.append(0)
        out.splits.append(Split(rollout, judge))
    return out


def best_disaggregated(trace: Trace, cluster: Cluster, staleness: int = 1) -> Outcome | None:
    """The fastest fixed roles, without judges if nothing is judged; None if a controller has too few devices."""
    judged = any(j for work in trace.steps for rounds in work.shares for batches in rounds for _, j in batches)
    tried = [
        disaggregated(trace, cluster, train, judge, staleness)
        for judge in (range(cluster.replica, cluster.devices - 1, cluster.replica) if judged else (0,))
        for train in range(1, cluster.devices - judge)
    ]
    return min(tried, key=lambda outcome: outcome.seconds, default=None)


@dataclass
class Comparison:
    """Every placement on one trace; ``bound``: the lower bound on the seconds of all steps."""

    bound: float
    outcomes: list[Outcome]
    best: Outcome
    """The best static placement, which is also in ``outcomes``."""


def compare(trace: Trace, cluster: Cluster, staleness: int = 1) -> Comparison:
    """Compare colocate, the best partial split, the best disaggregated placement (with three devices or more), and
    adaptive without and with switches within a step. Raises ``ValueError`` if a controller has one device."""
    if cluster.devices <= cluster.replica:
        raise ValueError(f"a controller's {cluster.devices} devices leave none beside a judge's {cluster.replica}")
    colocate, *partial = [static(trace, cluster, split) for split in splits(cluster.devices, cluster.replica)]
    fastest = min(partial, key=lambda outcome: outcome.seconds)
    apart = best_disaggregated(trace, cluster, staleness)
    outcomes = [
        colocate,
        fastest,
        *([apart] if apart else []),
        adaptive(trace, cluster, moves=False),
        adaptive(trace, cluster),
    ]
    best = min(colocate, fastest, key=lambda outcome: outcome.seconds)
    return Comparison(sum(bound(trace, cluster)), outcomes, best)


class _Lanes:
    """Final class: equal workers that take tasks in order, each when it is free."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count

    def take(self, ready: float, seconds: float) -> float:
        """The end of a task of ``seconds`` that is ready at ``ready``."""
        ends = max(heapq.heappop(self._free), ready) + seconds
        heapq.heappush(self._free, ends)
        return ends


def _pass(rounds: Rounds, rollout: _Lanes, judge: _Lanes, begins: float) -> float:
    """Send micro-batches through sampling and judging; returns the time when the last is judged."""
    for batches in rounds:
        sampled = sorted((rollout.take(begins, r), j) for r, j in batches)
        begins = max([begins, *(judge.take(ready, j) if j else ready for ready, j in sampled)])
    return begins
