"""Simulate a run's steps with every placement (``mmrl simulate``).

Controllers meet once a step, to train; until then each samples and judges its own share. ``adaptive`` calls
``mmrl.placement.adaptive``, the very functions of a real run. What is assumed stands in docs/placement.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmrl.placement.adaptive import Decision, Measured, Split, begin, decide, splits
from mmrl.simulator.generate_phase import Generate, Habits, Phase, Rounds
from mmrl.simulator.trace import Trace, Work


@dataclass(frozen=True)
class Cluster:
    """``controllers`` of ``devices`` each; ``replica``: devices of one judge replica."""

    controllers: int
    devices: int
    replica: int = 1

    @property
    def total(self) -> int:
        return self.controllers * self.devices


@dataclass
class Outcome:
    """What a placement made of a trace; lists have an entry for every step."""

    name: str
    devices: int
    steps: list[float] = field(default_factory=list)
    """Seconds of the step."""
    generate: list[float] = field(default_factory=list)
    """Seconds of the generate phase, of the controller that took longest; none where the slices are for good."""
    work: float = 0.0
    """Device-seconds of sampling, judging and training."""
    apart: float = 0.0
    """Device-seconds in which controllers that were done waited for the last one."""
    moves: list[int] = field(default_factory=list)
    """Devices moved from one role to the other inside the step."""
    splits: list[Split] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(self.steps)

    @property
    def idle(self) -> float:
        """Share of all device-seconds in which no work was done: waiting and moving."""
        return 1 - self.work / (self.seconds * self.devices)

    @property
    def changes(self) -> int:
        """How often the split changed between steps."""
        return sum(a != b for a, b in zip(self.splits, self.splits[1:], strict=False))


def device_seconds(work: Work, cluster: Cluster) -> float:
    """Of a step: sampling, judging and training."""
    batches = [batch for rounds in work.shares for batches in rounds for batch in batches]
    return sum(r + j * cluster.replica for r, j in batches) + work.train * cluster.total


def bound(trace: Trace, cluster: Cluster) -> list[float]:
    """Seconds of every step if all devices shared its work without a gap.

    Its device-seconds over the devices, or its longest chain (the longest micro-batch of each of a controller's rounds)
    where that is longer, then training. No placement that trains on what the present weights sampled can be faster.
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
    """The fastest static split, colocate among them: what one would choose who knew the whole run beforehand."""
    tried = [static(trace, cluster, split) for split in splits(cluster.devices, cluster.replica)]
    return min(tried, key=lambda outcome: outcome.seconds)


def adaptive(trace: Trace, cluster: Cluster, *, moves: bool = True) -> Outcome:
    """The split follows the load between steps; with ``moves``, devices move inside a step too."""
    out = Outcome("adaptive" if moves else "adaptive, split alone", cluster.total)
    state, habits = begin(cluster.devices, cluster.replica, moves=moves), None
    for work in trace.steps:
        phase = Generate(state.split, trace.price, cluster.replica, moves, habits)
        phases = _generate(out, work, cluster, phase)
        habits = Habits.of(phases) or habits
        state, decision = decide(state, measured(phases, cluster, trace.price))
        out.decisions.append(decision)
    return out


def measured(phases: Sequence[Phase], cluster: Cluster, price: float) -> Measured:
    """What a real run would have measured of these phases, one for each controller."""
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
    """Slices for good: of every controller ``train`` devices train, ``judge`` judge, the rest sample, and the sampling
    of a step begins when the weights are at most ``staleness`` versions behind.

    Training on fewer devices takes as much longer. Nothing is swapped, and new weights arrive without a stop.
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
    """The fastest slices, none of them for judging where there is none; None where a controller has too few devices."""
    judged = any(j for work in trace.steps for rounds in work.shares for batches in rounds for _, j in batches)
    tried = [
        disaggregated(trace, cluster, train, judge, staleness)
        for judge in (range(cluster.replica, cluster.devices - 1, cluster.replica) if judged else (0,))
        for train in range(1, cluster.devices - judge)
    ]
    return min(tried, key=lambda outcome: outcome.seconds, default=None)


@dataclass
class Comparison:
    """Every placement on one trace; ``bound`` in seconds, of all steps."""

    bound: float
    outcomes: list[Outcome]
    best: Outcome
    """The best static one, which is among ``outcomes``."""


def compare(trace: Trace, cluster: Cluster, staleness: int = 1) -> Comparison:
    """Colocate, the best partial split, the best slices for good (where a controller has three devices or more), and
    adaptive without and with moves inside a step. Raises ``ValueError`` where a controller has one device."""
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
    """Final class: equal servers that take work in its order, each when it is free."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count

    def take(self, ready: float, seconds: float) -> float:
        """When work that is ready then ends."""
        ends = max(heapq.heappop(self._free), ready) + seconds
        heapq.heappush(self._free, ends)
        return ends


def _pass(rounds: Rounds, rollout: _Lanes, judge: _Lanes, begins: float) -> float:
    """Send micro-batches through both slices; returns when the last is judged."""
    for batches in rounds:
        sampled = sorted((rollout.take(begins, r), j) for r, j in batches)
        begins = max([begins, *(judge.take(ready, j) if j else ready for ready, j in sampled)])
    return begins
