"""Simulate a run's steps with every placement (``mmrl simulate``).

Controllers synchronise once per step, to train; before that each samples and judges its own share. The scheduler and
the policies are those of a real run (``mmrl.placement``); only time and work are simulated. docs/placement.md lists the
assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from mmrl.config.placement import Placement
from mmrl.placement.adaptive import Decision, Split, decide, measured, opening, splits, starting
from mmrl.placement.scheduler import summed
from mmrl.placement.simulated_devices import SimulatedDevices, SimulatedTime
from mmrl.simulator.trace import Trace, Work


@dataclass(frozen=True)
class Cluster:
    """``controllers`` with ``devices`` each."""

    controllers: int
    devices: int

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
    return sum(r + j for r, j in batches) + work.train * cluster.total


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


def placed(trace: Trace, cluster: Cluster, settings: Placement, name: str) -> Outcome:
    """The steps of a run whose recipe has this section ``placement``, with the scheduler and the policy of the run.

    Each controller has its own devices; they wait for the slowest controller before they train.
    """
    out = Outcome(name, cluster.total)
    state = starting(settings, cluster.devices)
    controllers = [SimulatedDevices(cluster.devices, trace.price) for _ in range(cluster.controllers)]
    for work in trace.steps:
        split, moves = opening(settings, state.split, judged=True)
        for devices, rounds in zip(controllers, work.shares, strict=True):
            devices.step(rounds, split, moves)
        found = [devices.scheduler.numbers() for devices in controllers]
        phases = [max(numbers["rollout_done"], numbers["judge_done"]) for numbers in found]
        longest, numbers = max(phases), summed(found)
        out.generate.append(longest)
        out.steps.append(longest + work.train)
        out.work += device_seconds(work, cluster)
        out.apart += sum(longest - phase for phase in phases) * cluster.devices
        out.moves.append(int(numbers["moves"]) if moves == "worth" else 0)
        out.splits.append(state.split)
        if settings.type == "adaptive":
            state, decision = decide(state, measured(numbers, cluster.total))
            out.decisions.append(decision)
    return out


def static(trace: Trace, cluster: Cluster, split: Split) -> Outcome:
    """``colocate`` (judge 0), or ``partial`` with one split for the whole run."""
    if not split.judge:
        return placed(trace, cluster, Placement(), "colocate")
    settings = Placement(type="partial", judges=split.judge)
    return placed(trace, cluster, settings, f"partial {split.rollout}+{split.judge}")


def best_static(trace: Trace, cluster: Cluster) -> Outcome:
    """The fastest static split, including colocate: the best choice if the whole run was known beforehand."""
    return min((static(trace, cluster, split) for split in splits(cluster.devices)), key=lambda o: o.seconds)


def adaptive(trace: Trace, cluster: Cluster, *, moves: bool = True) -> Outcome:
    """The split follows the load between steps; with ``moves``, devices also switch roles within a step."""
    name = "adaptive" if moves else "adaptive, split alone"
    return placed(trace, cluster, Placement(type="adaptive", inside=moves), name)


def disaggregated(trace: Trace, cluster: Cluster, train: int, judge: int, staleness: int) -> Outcome:
    """Fixed roles: in every controller ``train`` devices train, ``judge`` judge and the rest sample. Sampling of a step
    starts when the weights are at most ``staleness`` versions behind.

    Training time is inversely proportional to its devices, and new weights arrive without delay.
    """
    split = Split(cluster.devices - train - judge, judge)
    out = Outcome(f"disaggregated {split.rollout}+{judge}+{train}", cluster.total)
    run = _Ahead(trace, cluster, split, cluster.devices / train, staleness)
    ends = [0.0, *run.trained()]
    out.steps = [after - before for before, after in pairwise(ends)]
    out.work = sum(device_seconds(work, cluster) for work in trace.steps)
    out.moves, out.splits = [0] * len(out.steps), [split] * len(out.steps)
    return out


def best_disaggregated(trace: Trace, cluster: Cluster, staleness: int = 1) -> Outcome | None:
    """The fastest fixed roles, without judges if nothing is judged; None if a controller has too few devices."""
    judged = any(j for work in trace.steps for rounds in work.shares for batches in rounds for _, j in batches)
    tried = [
        disaggregated(trace, cluster, train, judge, staleness)
        for judge in (range(1, cluster.devices - 1) if judged else (0,))
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
    if cluster.devices < 2:
        raise ValueError("a controller of one device leaves none beside a judge")
    colocate, *partial = [static(trace, cluster, split) for split in splits(cluster.devices)]
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


class _Ahead:
    """Final class: controllers whose devices have fixed roles and sample ahead of training, on one clock."""

    def __init__(self, trace: Trace, cluster: Cluster, split: Split, slower: float, staleness: int) -> None:
        self._steps, self._staleness = trace.steps, staleness
        self._seconds = [work.train * slower for work in trace.steps]
        self._time = SimulatedTime()
        self._controllers = [SimulatedDevices(cluster.devices, 0.0, self._time) for _ in range(cluster.controllers)]
        for devices in self._controllers:
            devices.scheduler.apart(split)
        self._judged = [cluster.controllers] * len(trace.steps)
        self._trained: list[float] = []
        self._training = False

    def trained(self) -> list[float]:
        """When each step has been trained."""
        for step in range(min(self._staleness + 1, len(self._steps))):
            self._sample(step)
        self._time.run()
        return self._trained

    def _sample(self, step: int) -> None:
        for devices, rounds in zip(self._controllers, self._steps[step].shares, strict=True):
            devices.rounds_ahead(step, rounds, lambda: self._finished(step))

    def _finished(self, step: int) -> None:
        self._judged[step] -= 1
        self._train()

    def _train(self) -> None:
        step = len(self._trained)
        if not self._training and step < len(self._judged) and not self._judged[step]:
            self._training = True
            self._time.after(self._seconds[step], self._updated)

    def _updated(self) -> None:
        self._trained.append(self._time.now)
        self._training = False
        later = len(self._trained) + self._staleness
        if later < len(self._steps):
            self._sample(later)
        self._train()
