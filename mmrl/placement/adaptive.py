"""Choose how many of a controller's devices judge while the others sample, from the load of the last steps.

``decide`` works between steps, ``worth_moving`` within a step. Both are pure functions. ``decide`` gets the same
numbers on every controller, so all controllers decide the same without coordination. The simulator calls the same
functions. Imports no torch.

Seconds below are wall-clock seconds unless they are called device-seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mmrl.config.placement import Placement

SMOOTHING = 0.5
"""Weight of the latest step in the smoothed busy seconds."""
WORTH = 0.03
"""The smallest share of the generate phase that a new split must be expected to save (hysteresis)."""
MOST_TURNS = 2
"""Every change that reverses the previous one doubles ``WORTH``, at most this often, so that noise cannot toggle it."""
SETTLED = 6
"""Steps after which an unchanged split is settled, so that a change must save twice ``WORTH``."""
HORIZON = 10
"""Steps within which the saved time must exceed the price of the move."""
LEARNING = 0.3
"""Weight of the latest step, after the first, in the excess over the formula of a kind of split."""


Moves = Literal["never", "after", "worth"]
"""When a device switches its role within a phase: never (except if no device is left for the work), after all sampling
has ended (colocate), or when that saves more time than it costs."""


@dataclass(frozen=True)
class Split:
    """The roles of one controller's devices when generating; ``judge`` 0 is colocate: all sample, then all judge."""

    rollout: int
    judge: int

    @property
    def judging(self) -> int:
        """How many judge at some time of the phase: under colocate all that sample."""
        return self.judge or self.rollout


@dataclass(frozen=True)
class Measured:
    """One step's generate phase, all-reduced; busy: device-seconds summed over all devices of all controllers."""

    rollout_busy: float
    judge_busy: float
    rollout_done: float
    """From the phase's start to the end of the last sampling, the latest of all controllers."""
    judge_done: float
    """The same for the last judging."""
    devices: int
    """The devices of all controllers together."""
    price: float
    """Seconds that a device needs to switch its role: sleep, wake, weights."""
    micro_batches: int = 0
    """Judged micro-batches of all controllers; 0 if not counted, and then the time to fill and drain is learned."""


@dataclass(frozen=True)
class Work:
    """The work of one controller's generate phase: device-seconds in each role, and one micro-batch's share of them."""

    rollout: float
    judge: float
    grain: float = 0.0
    """One over the number of micro-batches; 0 if it is not known."""


@dataclass(frozen=True)
class State:
    """What ``decide`` knows about earlier steps. ``dataclasses.asdict`` and ``State.read`` convert to JSON and back."""

    devices: int
    """The devices of one controller."""
    replica: int
    """Devices of one judge replica."""
    split: Split
    kept: int = 0
    """Steps measured under this split."""
    rollout_busy: float = 0.0
    """Device-seconds of one controller, smoothed."""
    judge_busy: float = 0.0
    grain: float = 0.0
    """As in ``Work``, smoothed too."""
    moves: bool = True
    """Whether devices also move inside a step."""
    way: int = 0
    """The direction of the last change: 1 to more judges, -1 to fewer."""
    turns: int = 0
    """The number of changes that reversed the previous one, except those that ended a trial."""
    trial: bool = False
    """Whether the current split is the first of its kind."""
    over: dict[str, float] = field(default_factory=dict)
    """By kind of ``formula``: the phases' excess over ``formula``, as a share of the even time, smoothed."""

    @classmethod
    def read(cls, values: Mapping[str, Any], settings: Placement) -> State:
        """Read a state that was stored as JSON. ``settings`` decide whether devices move within a step: a resumed run
        may have different settings than the run that wrote the state."""
        known = dict(values)
        known |= {"split": Split(**values["split"]), "moves": settings.inside}
        return cls(**known)


@dataclass(frozen=True)
class Decision:
    """The split of the next step, a sentence with the reason, and the numbers behind it."""

    split: Split
    why: str
    numbers: dict[str, float]


def splits(devices: int, replica: int = 1) -> list[Split]:
    """Every split of a controller's devices in whole judge replicas, colocate first."""
    return [Split(devices, 0), *(Split(devices - n, n) for n in range(replica, devices, replica))]


def begin(devices: int, replica: int = 1, *, moves: bool = True) -> State:
    """The state of a run before its first measurement.

    It starts with colocate, which is never much slower than the best split, and whose first step measures the work of
    both roles and the price of a move. ``moves``: devices also move within a step, by ``worth_moving``.

    Raises ``ValueError`` if there is no device or a replica has none.
    """
    if devices < 1 or replica < 1:
        raise ValueError(f"{devices} devices of a controller and {replica} of a judge replica: both must be at least 1")
    return State(devices, replica, Split(devices, 0), moves=moves)


def starting(settings: Placement, devices: int, *, judged: bool = True) -> State:
    """The split at the start of a run; ``judged``: some reward runs on a device."""
    state = begin(devices, moves=settings.inside)
    judges = settings.judging(devices) if judged else 0
    left = devices - settings.training(devices) if settings.apart else devices
    return replace(state, split=Split(left - judges, judges))


def opening(settings: Placement, split: Split, *, judged: bool) -> tuple[Split, Moves]:
    """How a generate phase begins under ``split``, the split of the step: the roles of the devices, and when a device
    switches its role. ``judged``: rewards run on devices in this phase, which an evaluation does without."""
    apart = bool(split.judge) and judged
    moves: Moves = "never" if apart else "after"
    if settings.type == "adaptive" and settings.inside and judged:
        moves = "worth"
    return (split if apart else Split(split.rollout + split.judge, 0)), moves


def measured(numbers: Mapping[str, float], devices: int) -> Measured:
    """From the ``scheduler.summed`` numbers of a step; ``devices``: of all controllers."""
    return Measured(
        numbers["rollout_busy"],
        numbers["judge_busy"],
        numbers["rollout_done"],
        numbers["judge_done"],
        devices,
        numbers["price"],
        int(numbers["micro_batches"]),
    )


def decide(state: State, measured: Measured) -> tuple[State, Decision]:
    """The split for the next step.

    The target is the split with the shortest expected phase (``expected``). The first decision takes it at once; later
    ones move half the way to it, in whole replicas, and only if the target saves ``WORTH`` of the phase (more after the
    split is settled, or after reversals) and the savings exceed the price of the move within ``HORIZON`` steps. A
    change to or from colocate is one move.
    """
    latest, phase = _work(state, measured), max(measured.rollout_done, measured.judge_done)
    if latest.rollout + latest.judge <= 0 or phase <= 0:
        return state, Decision(state.split, "nothing was sampled or judged, so the split stays", {})
    first = state.rollout_busy + state.judge_busy == 0
    weight = 1.0 if first else SMOOTHING
    state = replace(
        state,
        kept=state.kept + 1,
        rollout_busy=state.rollout_busy + weight * (latest.rollout - state.rollout_busy),
        judge_busy=state.judge_busy + weight * (latest.judge - state.judge_busy),
        grain=state.grain + weight * (latest.grain - state.grain),
        over=_learn(state, latest, phase, measured.price),
    )
    rollout, judge = state.rollout_busy, state.judge_busy
    even = (rollout + judge) / state.devices
    times = expected(state, measured.price)
    now, target = times[state.split], min(times, key=lambda split: (times[split], split != state.split))
    saved = now - times[target]
    numbers = {
        "rollout_busy": rollout,
        "judge_busy": judge,
        "judge_share": judge / (rollout + judge),
        "phase": phase,
        "even": even,
        "expected_now": now,
        "expected_target": times[target],
        "price": measured.price,
        "target_judge": float(target.judge),
    }
    if target == state.split:
        return state, Decision(state.split, f"no split is expected to be faster than {_name(state.split)}", numbers)
    way = 1 if target.judge > state.split.judge else -1
    turns = min(state.turns + (way == -state.way and not state.trial), MOST_TURNS)
    worth = WORTH * 2 ** (turns + (state.kept > SETTLED))
    if not first and (saved < worth * now or saved * HORIZON < measured.price):
        why = f"{_name(target)} would save {saved:.2f} s of {now:.2f} s a step, too little for a move"
        return state, Decision(state.split, why, numbers)
    split = target if first else _half_way(state, target)
    seconds = f"sampling took {rollout:.2f} device-seconds and judging {judge:.2f}"
    why = f"{seconds}: {_name(state.split)} to {_name(split)}, expected to save {saved:.2f} s of {now:.2f} s a step"
    work = Work(rollout, judge, state.grain)
    trial = formula(state, split, work, measured.price)[1] not in state.over
    state = replace(state, split=split, kept=0, way=0 if first else way, turns=turns, trial=trial)
    return state, Decision(split, why, numbers)


def expected(state: State, price: float) -> dict[Split, float]:
    """The expected seconds of the generate phase with every split: ``formula`` plus the learned excess of its kind; at
    least the even time, in which all devices share all work."""
    work = Work(state.rollout_busy, state.judge_busy, state.grain)
    even = (work.rollout + work.judge) / state.devices
    found = {split: formula(state, split, work, price) for split in splits(state.devices, state.replica)}
    return {split: max(even, seconds + state.over.get(kind, 0.0) * even) for split, (seconds, kind) in found.items()}


def formula(state: State, split: Split, work: Work, price: float) -> tuple[float, str]:
    """Seconds of a phase without tails, and its kind: colocate, apart or joined.

    For a split: the time of the role with more work per device, plus the sampling of the first micro-batch (if that is
    judging) or the judging of the last one (if that is sampling). If devices move within a step and judging takes
    longer, the samplers join it when they are done, if that is faster. For colocate: the time of both roles, and the
    price of switching between them.
    """
    fill, drain = work.rollout * work.grain, work.judge * work.grain / state.replica
    if not split.judge:
        return (work.rollout + work.judge) / state.devices + (price if work.judge else 0.0), "colocate"
    sampled, judged = work.rollout / split.rollout, fill + work.judge / split.judge
    apart = max(sampled + drain, judged)
    if not state.moves or judged <= sampled:
        return apart, "apart"
    left = work.judge - max(sampled - fill, 0.0) * split.judge
    joined = sampled + (left + split.rollout * price) / state.devices + drain / 2
    return min((apart, "apart"), (max(joined, sampled + price), "joined"))


def worth_moving(own_left: float, other_left: float, other_devices: int, price: float, own_devices: int = 0) -> bool:
    """Whether a device without work in its role should switch to the other role within a step.

    ``own_left``: device-seconds of future work in its own role (a judge waits for samples); ``other_left``: those of
    waiting tasks in the other role; ``other_devices``: devices that work in that role or are switching to it;
    ``price``: seconds of one switch; ``own_devices``: other devices that stay in its own role.

    It switches if the other role then ends earlier, the price included; if its own role will have work again, only if
    the later end of both roles becomes earlier. The device is idle, so any gain is enough.
    """
    if other_left <= 0:
        return False
    if other_devices == 0:
        return True
    now, then = other_left / other_devices, (other_left + price) / (other_devices + 1)
    if own_left > 0:
        now = max(now, own_left / (own_devices + 1))
        then = max(then, own_left / own_devices) if own_devices else then + price + own_left
    return then < now


def _work(state: State, measured: Measured) -> Work:
    controllers = measured.devices / state.devices
    grain = controllers / measured.micro_batches if measured.micro_batches else 0.0
    return Work(measured.rollout_busy / controllers, measured.judge_busy / controllers, grain)


def _learn(state: State, work: Work, phase: float, price: float) -> dict[str, float]:
    """``State.over`` after a step of ``work`` that took ``phase`` seconds."""
    seconds, kind = formula(state, state.split, work, price)
    over = max(phase - seconds, 0.0) * state.devices / (work.rollout + work.judge)
    before = state.over.get(kind, over)
    return {**state.over, kind: before + LEARNING * (over - before)}


def _half_way(state: State, target: Split) -> Split:
    here = state.split.judge
    if not (here and target.judge):
        return target
    replicas = (target.judge - here) // state.replica
    half = (abs(replicas) + 1) // 2 * (1 if replicas > 0 else -1)
    judge = here + half * state.replica
    return Split(state.devices - judge, judge)


def _name(split: Split) -> str:
    return f"{split.rollout} sampling + {split.judge} judging" if split.judge else f"all {split.rollout} in turn"
