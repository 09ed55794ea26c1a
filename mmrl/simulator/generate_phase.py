"""Simulate the generate phase of one controller event by event: sampling, judging, waiting and moves.

The work comes in rounds of micro-batches, each (seconds of sampling on a device, seconds of judging on a judge
replica). A micro-batch is judged after it is sampled; the next round (replacements of dynamic sampling) starts after
all micro-batches of a round are judged, as in ``mmrl.rollout.collect``.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmrl.placement.adaptive import Split, worth_moving

MicroBatch = tuple[float, float]
Rounds = list[list[MicroBatch]]
ROLLOUT, JUDGE, WAKE = "rollout", "judge", "wake"


@dataclass(frozen=True)
class Span:
    """One activity of a device, in seconds from the phase's start; the role ``wake`` is a switch of roles."""

    device: int
    role: str
    began: float
    ended: float


@dataclass
class Phase:
    """The result of a phase: busy in device-seconds, done in seconds from the start, micro-batches, and moves."""

    rollout_busy: float = 0.0
    judge_busy: float = 0.0
    rollout_done: float = 0.0
    judge_done: float = 0.0
    sampled: int = 0
    judged: int = 0
    later: int = 0
    moves: int = 0
    """Role switches of single devices within the phase, without the switches of colocate."""
    spans: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return max(self.rollout_done, self.judge_done)


@dataclass(frozen=True)
class Expectations:
    """Expectations from the previous step: mean device-seconds of a micro-batch in each role."""

    rollout: float
    judge: float
    again: float = 0.0
    """Micro-batches of later rounds per micro-batch of the first round."""

    @classmethod
    def of(cls, phases: Sequence[Phase]) -> Expectations | None:
        """The expectations from the phases of all controllers; None if nothing was judged."""
        judged = sum(phase.judged for phase in phases)
        if not judged:
            return None
        busy = [sum(phase.rollout_busy for phase in phases), sum(phase.judge_busy for phase in phases)]
        return cls(busy[0] / judged, busy[1] / judged, sum(phase.later for phase in phases) / judged)


@dataclass
class _Block:
    """Devices that switch roles together, as many as a judge replica has; ``busy``: how many are working."""

    devices: list[int]
    role: str
    busy: int = 0
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = self.devices[::-1]


@dataclass
class Generate:
    """One controller's phase with ``split``. ``moves``: devices may switch roles within the phase, by ``worth_moving``;
    otherwise a split stays, and colocate switches all devices when the current role has no work left.

    ``price``: seconds of a switch. ``expectations``: None takes the means of the tasks finished so far. ``record``:
    fill ``Phase.spans``.
    """

    split: Split
    price: float
    replica: int = 1
    moves: bool = False
    expectations: Expectations | None = None
    record: bool = False

    def run(self, rounds: Rounds) -> Phase:
        """Simulate one controller's work; micro-batches start in their order."""
        total = self.split.rollout + self.split.judge
        ends = range(total, 0, -self.replica)
        self._blocks = [_Block(list(range(max(end - self.replica, 0), end)), ROLLOUT) for end in ends]
        for block in self._blocks[: self.split.judge // self.replica]:
            block.role = JUDGE
        self._events: list[tuple[float, int, str, _Block, int, MicroBatch]] = []
        self._counter = 0
        self._rounds = deque(rounds)
        self._waiting: dict[str, deque[MicroBatch]] = {ROLLOUT: deque(), JUDGE: deque()}
        self._under_way = {ROLLOUT: 0, JUDGE: 0}
        self._phase = Phase()
        self._next_round()
        self._assign(0.0)
        while self._events:
            now, _, kind, block, device, batch = heapq.heappop(self._events)
            block.busy -= 1
            if kind == WAKE:
                block.free = block.devices[::-1]
            else:
                self._ended(now, kind, block, device, batch)
            self._assign(now)
        return self._phase

    def _next_round(self) -> None:
        if self._rounds:
            batches = self._rounds.popleft()
            self._phase.later += len(batches) if self._phase.judged else 0
            self._waiting[ROLLOUT].extend(batches)

    def _ended(self, now: float, kind: str, block: _Block, device: int, batch: MicroBatch) -> None:
        phase = self._phase
        self._under_way[kind] -= 1
        if kind == ROLLOUT:
            block.free.append(device)
            phase.rollout_busy += batch[0]
            phase.rollout_done, phase.sampled = now, phase.sampled + 1
            self._waiting[JUDGE].append(batch)
            return
        block.free = block.devices[::-1]
        phase.judge_busy += batch[1] * self.replica
        phase.judge_done, phase.judged = now, phase.judged + 1
        if not (self._waiting[ROLLOUT] or self._waiting[JUDGE] or any(self._under_way.values())):
            self._next_round()

    def _assign(self, now: float) -> None:
        """Assign waiting work to free devices, then switch roles of devices without work."""
        for block in self._blocks:
            waiting = self._waiting[block.role]
            while waiting and block.free:
                device = block.free.pop() if block.role == ROLLOUT else block.devices[0]
                if block.role == JUDGE:
                    block.free = []
                batch = waiting.popleft()
                self._under_way[block.role] += 1
                self._push(now, batch[block.role == JUDGE], block.role, block, device, batch)
        dry = [b for b in self._blocks if not b.busy and not self._waiting[b.role] and len(b.devices) == self.replica]
        if self.moves:
            for block in dry:
                other = ROLLOUT if block.role == JUDGE else JUDGE
                if self._waiting[other] and self._worth(block.role, other):
                    self._phase.moves += len(block.devices)
                    self._turn(now, block, other)
        elif not self.split.judge and not self._events:
            role = JUDGE if self._waiting[JUDGE] else ROLLOUT
            for block in dry if self._waiting[role] else ():
                self._turn(now, block, role)

    def _worth(self, own: str, other: str) -> bool:
        """``worth_moving`` with a controller's knowledge: the waiting work, and the mean time of a micro-batch."""
        devices = {role: sum(len(b.devices) for b in self._blocks if b.role == role) for role in (own, other)}
        if not devices[other]:
            return True
        phase, expectations = self._phase, self.expectations
        if expectations is None and phase.judged and phase.sampled:
            mean = phase.rollout_busy / phase.sampled, phase.judge_busy / phase.judged
            expectations = Expectations(*mean, phase.later / phase.judged)
        if expectations is None:
            return False
        if own == JUDGE:
            own_left = (len(self._waiting[ROLLOUT]) + self._under_way[ROLLOUT]) * expectations.judge
            other_left = len(self._waiting[ROLLOUT]) * expectations.rollout
        else:
            ahead = len(self._waiting[JUDGE]) + self._under_way[JUDGE]
            own_left = ahead * expectations.again * expectations.rollout
            other_left = len(self._waiting[JUDGE]) * expectations.judge
        return worth_moving(own_left, other_left, devices[other], self.price, devices[own] - self.replica)

    def _turn(self, now: float, block: _Block, role: str) -> None:
        block.role, block.free = role, []
        self._push(now, self.price, WAKE, block, block.devices[0], (0.0, 0.0))

    def _push(self, now: float, seconds: float, kind: str, block: _Block, device: int, batch: MicroBatch) -> None:
        block.busy += 1
        self._counter += 1
        heapq.heappush(self._events, (now + seconds, self._counter, kind, block, device, batch))
        if self.record:
            whole = [device] if kind == ROLLOUT else block.devices
            self._phase.spans.extend(Span(one, kind, now, now + seconds) for one in whole)
