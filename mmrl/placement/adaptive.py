"""Choose how a controller's devices sample and judge in the next step, from what the last steps would have taken.

``decide`` works between steps, ``worth_moving`` within a step. Both are pure functions. ``decide`` gets the same
numbers on every controller, so all controllers decide the same without coordination. The simulator calls the same
functions. Imports no torch.

Seconds below are wall-clock seconds unless they are called device-seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from mmrl.config.placement import Placement

MEMORIES = (0.0, 0.5, 0.75, 0.875, 1.0)
"""Ways to learn from the past: the weight of the step before, for the latest step alone up to all steps alike."""
FORGET = 1 - 1 / 32
"""The weight of the step before in the totals of the choosers."""
LEAD = 0.05
"""Another chooser must be ahead by this share of a step, in total, before it is followed."""
PATIENCE = 2
"""Steps of a run under its first placement: one step does not show whether a load is steady."""

Moves = Literal["never", "after", "worth"]
"""When a device switches its role within a phase: never (except if no device is left for the work), after all sampling
has ended (colocate), or when that saves more time than it costs."""


@dataclass(frozen=True)
class Split:
    """The roles of one controller's devices when generating; ``judge`` 0: all sample first."""

    rollout: int
    judge: int

    @property
    def judging(self) -> int:
        """How many judge at some time of the phase: under colocate all that sample."""
        return self.judge or self.rollout


@dataclass(frozen=True)
class Candidate:
    """A way to place the generate phase of a step."""

    split: Split
    moves: Moves

    @property
    def name(self) -> str:
        if not self.split.judge:
            return "greedy" if self.moves == "worth" else "all in turn"
        moves = " with moves" if self.moves == "worth" else ""
        return f"{self.split.rollout} sampling + {self.split.judge} judging{moves}"


@dataclass(frozen=True)
class State:
    """What ``decide`` knows about earlier steps. ``dataclasses.asdict`` and ``State.read`` convert to JSON and back."""

    devices: int
    """The devices of one controller that sample or judge."""
    split: Split
    moves: Moves
    inside: bool = True
    """Whether candidates with moves within a step may be chosen."""
    ahead: bool = False
    """Whether these devices sample for later steps while others train."""
    steps: int = 0
    """Steps that were measured."""
    losses: list[list[float]] = field(default_factory=list)
    """For each of ``MEMORIES``: the seconds of every candidate, summed with that memory."""
    totals: list[float] = field(default_factory=list)
    """Of every chooser: the seconds that its choices would have taken. The choosers are the memories, each of which
    chooses the candidate with the smallest sum, and then the candidates themselves."""
    chooser: int = -1
    """The chooser that is followed; -1: none yet."""

    def read(self, values: Mapping[str, Any]) -> State:
        """Read a state that was stored as JSON. If it is of other candidates (an earlier version, other devices,
        another ``placement.inside``), this one, the state at the start of a run."""
        same = all(values.get(k, False) == getattr(self, k) for k in ("devices", "inside", "ahead"))
        if not same or "chooser" not in values:
            return self
        given: dict[str, Any] = {**values, "split": Split(**values["split"])}
        return State(**given)


@dataclass(frozen=True)
class Decision:
    """The placement of the next step, a sentence with the reason, and the numbers behind it."""

    split: Split
    why: str
    numbers: dict[str, float]


def splits(devices: int) -> list[Split]:
    """Every split of a controller's devices, all sampling first."""
    return [Split(devices - judge, judge) for judge in range(devices)]


def candidates(devices: int, *, inside: bool = True, ahead: bool = False) -> list[Candidate]:
    """What the policy chooses from, greedy first: every split, with and without moves within a step (``inside``).

    ``ahead``: for devices that sample for later steps, among which no phase ends in which all sample.
    """
    found = []
    for split in splits(devices):
        if inside:
            found.append(Candidate(split, "worth"))
        if split.judge or not ahead:
            found.append(Candidate(split, "never" if split.judge else "after"))
    return found


def starting(settings: Placement, devices: int, *, judged: bool = True) -> State:
    """The state at the start of a run; ``judged``: some reward runs on a device.

    Raises ``ValueError`` if there is no device.
    """
    if devices < 1:
        raise ValueError(f"{devices} devices of a controller: there must be at least 1")
    judges = settings.judging(devices) if judged else 0
    left = devices - settings.training(devices) if settings.apart else devices
    moves: Moves = "worth" if settings.moves else "never" if judges or settings.apart else "after"
    return State(left, Split(left - judges, judges), moves, settings.inside, settings.apart)


def opening(state: State, *, judged: bool) -> tuple[Split, Moves]:
    """How a generate phase begins: the roles of the devices, and when a device switches its role. ``judged``: rewards
    run on devices beside sampling in this phase; an evaluation samples first."""
    if not judged:
        return Split(state.devices, 0), "after"
    return state.split, state.moves


def impossible(state: State) -> str | None:
    """What is wrong with a placement that no controller can take; None if nothing is."""
    split, devices = state.split, state.devices
    if split.rollout + split.judge != devices:
        return f"{split.rollout} devices sample and {split.judge} judge, and a controller has {devices}"
    if split.rollout < 1 or split.judge < 0:
        return f"{split.rollout} devices of {devices} sample, and at least one must"
    if not split.judge and state.moves == "never":
        return "no device judges, and none may begin to"
    return None


def decide(state: State, tried: Sequence[float]) -> tuple[State, Decision]:
    """The placement of the next step. ``tried``: the seconds that the generate phase of the last step would have taken
    with each of ``candidates``, on the slowest controller (``what_if.tried``); empty if nothing was judged.

    Which memory of the past serves best depends on the load: after a shift the latest step, on a judge that is slow
    every other step all steps. So every chooser's choices are added up as if they had been made, and the best so far
    is followed. That bounds the regret against every candidate, and a load that alternates cannot make it alternate.
    """
    if not tried:
        return state, Decision(state.split, "nothing was judged, so the placement stays", {})
    known = candidates(state.devices, inside=state.inside, ahead=state.ahead)
    losses = state.losses or [[0.0] * len(known) for _ in MEMORIES]
    current = known.index(Candidate(state.split, state.moves))
    made = [_least(sums) for sums in losses] if state.losses else [current] * len(MEMORIES)
    totals = state.totals or [0.0] * (len(MEMORIES) + len(known))
    seconds = [*(tried[choice] for choice in made), *tried]
    totals = [FORGET * total + new for total, new in zip(totals, seconds, strict=True)]
    losses = [
        [memory * old + new for old, new in zip(sums, tried, strict=True)]
        for memory, sums in zip(MEMORIES, losses, strict=True)
    ]
    chooser = state.chooser if state.chooser >= 0 else len(MEMORIES) + current
    best = _least(totals)
    if state.steps + 1 >= PATIENCE and totals[chooser] - totals[best] > LEAD * sum(tried) / len(tried):
        chooser = best
    choices = [*(_least(sums) for sums in losses), *range(len(known))]
    chosen = choices[chooser]
    numbers = {
        "phase": tried[current],
        "chosen": tried[chosen],
        "greedy": tried[0],
        "best": min(tried),
        "regret": totals[chooser] - totals[best],
        "memory": float(MEMORIES[chooser]) if chooser < len(MEMORIES) else -1.0,
    }
    why = _why(known[current], known[chosen], chooser, tried[current], tried[chosen])
    split, moves = known[chosen].split, known[chosen].moves
    state = replace(
        state, split=split, moves=moves, steps=state.steps + 1, losses=losses, totals=totals, chooser=chooser
    )
    return state, Decision(split, why, numbers)


class Next(NamedTuple):
    """The placement of the next step. ``refused``: what was wrong with the policy's, if another one is taken."""

    settings: Placement
    state: State
    decision: Decision
    refused: str | None = None


def next_placement(settings: Placement, state: State, tried: Sequence[float], devices: int) -> Next:
    """``decide`` the next placement. Where its decision cannot be, the run goes on with ``settings.where_refused``.
    ``devices``: of a controller."""
    state, decision = decide(state, tried)
    problem = impossible(state)
    if problem is None:
        return Next(settings, state, decision)
    instead, settings = settings.where_refused
    state = starting(settings, devices)
    refused = f"{decision.why!r} cannot be: {problem}; the run goes on under {instead}"
    decision = replace(decision, split=state.split, why=f"refused, {instead} from now on: {problem}")
    return Next(settings, state, decision, refused)


def _why(current: Candidate, chosen: Candidate, chooser: int, now: float, then: float) -> str:
    source = "by the step before"
    if chooser >= len(MEMORIES):
        source = "the best single choice so far"
    elif MEMORIES[chooser]:
        source = f"by {'all steps' if MEMORIES[chooser] == 1 else f'the last {1 / (1 - MEMORIES[chooser]):.0f} steps'}"
    if chosen == current:
        return f"{current.name} stays, {source}"
    return f"{current.name} to {chosen.name}, {source}; the last step would have taken {then:.2f} s, not {now:.2f} s"


def worth_moving(
    own_left: float,
    other_left: float,
    other_devices: int,
    price: float,
    own_devices: int = 0,
    *,
    back: float | None = None,
) -> bool:
    """Whether a device without work in its role should switch to the other role within a step.

    ``own_left``: device-seconds of future work in its own role (a judge waits for samples); ``other_left``: those of
    waiting tasks in the other role; ``other_devices``: devices that work in that role or are switching to it;
    ``price``: seconds of the switch, ``back``: of the way back (None: as long); ``own_devices``: other devices that
    stay in its own role.

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
        there_and_back = then + (price if back is None else back) + own_left
        then = max(then, own_left / own_devices) if own_devices else there_and_back
    return then < now


def worth_lending(left: float, devices: int, task: float, price: float, back: float, other: float = 0.0) -> bool:
    """Whether a device that waits to train should take a task of another role.

    ``left``: device-seconds of the role that the device's step still needs; ``devices``: those that work in it;
    ``task``: seconds of one task; ``price``: until the device has the role, ``back``: until it can train again;
    ``other``: seconds until the third role is done with the step.

    It does if the step is ready to train earlier, or if it is back before the step is ready: an idle device's time is
    free, and the others go on to the next step sooner.
    """
    if left <= 0 or not devices:
        return left > 0
    now, then = max(left / devices, other), max((left + price) / (devices + 1), other)
    return then + back < now or price + task + back <= then


def _least(values: Sequence[float]) -> int:
    return min(range(len(values)), key=values.__getitem__)
