"""A controller's devices in simulated time: an event loop that drives the ``Scheduler`` of a run.

The work comes in rounds of micro-batches. A micro-batch is judged after it is sampled, on a device, outside of the
devices (a judge behind HTTP), or both. The next round (replacements of dynamic sampling) begins after all micro-batches
of a round are judged, as in ``mmrl.rollout.rounds``. Imports no torch.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from mmrl.config.placement import Placement
from mmrl.placement.adaptive import Moves, Split
from mmrl.placement.portions import Claims, Numbers, ahead
from mmrl.placement.scheduler import Scheduler
from mmrl.placement.tasks import Call, Role


class MicroBatch(NamedTuple):
    """Seconds of sampling and of judging on a device, and the calls outside of the devices after sampling. ``judges``:
    the seconds of each of several judges, whose sum is ``judging``."""

    sampling: float
    judging: float
    calls: tuple[Call, ...] = ()
    judges: tuple[tuple[str, float], ...] = ()

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """The tasks of judging."""
        return self.judges or ((("", self.judging),) if self.judging else ())


Rounds = list[list[MicroBatch]]


class SimulatedTime:
    """Final class: calls functions in the order of their moments."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, call))

    def run(self) -> None:
        """Until nothing is left to call."""
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


class Claimed(Claims):
    """Final class: what a controller claims of the first rounds of all, ``lists``; a portion is one micro-batch.
    ``moved``: how many were not its own."""

    def __init__(self, rank: int, lists: Sequence[Sequence[MicroBatch]], counters: Numbers, devices: int) -> None:
        super().__init__(rank, [*map(len, lists)], counters, devices)
        self.moved, self._lists = 0, lists

    def next(self) -> MicroBatch | None:
        """The next micro-batch; None where there is none now."""
        number = self.own()
        if number is not None:
            return self._lists[self._rank][number]
        found = self.other()
        if found is None:
            return None
        self.moved += 1
        return self._lists[found[0]][found[1]]


@dataclass(eq=False, slots=True)
class SimulatedTask:
    """A task that takes ``seconds``; ``then`` is called after it."""

    role: Role
    seconds: float
    then: Callable[[], None]
    device: int | None = None
    updates: int | None = None
    of: tuple[int, int] | None = None
    to: Role | None = None
    """The role that a device switches to for it, if that is not ``role``."""
    judge: str = ""
    at: tuple[int, int] = (0, 0)
    """The round of the step, and the micro-batch in it (of a judge that wakes its device)."""


class Times(NamedTuple):
    """The seconds of a task on a device: after it was handed out it begins, the device switches its role, works, and
    the end is heard; then the device asks for its next task."""

    begins: float
    turns: float
    works: float
    ends: float
    asks: float


class SimulatedDevices:
    """``price``: seconds in which a device switches to judging, ``back``: to sampling; None: as long. A device that was
    lent is back for training after ``home`` (None: ``price``). ``slow``: tasks take so many times as long. A subclass
    may know more about the times (``times``, ``waits``, ``pause``); here nothing but switches and work takes time.

    When a step begins, every device is ready to sample: what the end of training takes is part of training.
    """

    def __init__(
        self,
        devices: int,
        price: float,
        time: SimulatedTime | None = None,
        back: float | None = None,
        home: float | None = None,
        slow: float = 1.0,
        settings: Placement | None = None,
    ) -> None:
        self.time, self._slow = time or SimulatedTime(), slow
        self.scheduler: Scheduler[SimulatedTask] = Scheduler(devices, lambda: self.time.now, settings or Placement())
        self._calls = SimulatedCalls()
        self.decisions: list[tuple[int, Role, tuple[int, int]]] = []
        """Of the step so far: the device, and the role and ``at`` of the task that it got."""
        self._price: dict[Role, float] = {
            "judge": price,
            "rollout": price if back is None else back,
            "train": price if home is None else home,
        }
        self._awake: list[set[str]] = [{"rollout"} for _ in range(devices)]
        """The roles that a device can take without a switch; of several judges each is one."""
        self._last: list[Role] = ["rollout"] * devices
        self._loaded: list[int | None] = [None] * devices
        """The version of the weights that each device sampled with last."""
        for device in range(devices):
            self.scheduler.idle(device)

    def times(self, device: int, task: SimulatedTask, turn: float) -> Times:
        """The times of a task, for which the device switches its role in ``turn`` seconds (0: it has the role)."""
        return Times(0.0, turn, task.seconds * self._slow, 0.0, 0.0)

    def waits(self, task: SimulatedTask) -> float:
        """Seconds until a task is in the queue: after the round began, or for judging after its sampling ended."""
        return 0.0

    def pause(self, number: int) -> float:
        """Seconds before round ``number`` begins, after the start of the step or the end of the round before it."""
        return 0.0

    def step(self, rounds: Rounds, split: Split, moves: Moves) -> None:
        """Simulate the generate phase of a step; ``scheduler`` has what happened."""
        self.begin(rounds, split, moves)
        self.time.run()

    def begin(self, rounds: Rounds, split: Split, moves: Moves, coming: Claimed | None = None) -> None:
        """Begin the generate phase of a step, which happens when ``time`` runs. ``coming``: claims the micro-batches of
        the first round, in place of those of ``rounds``."""
        self._awake = [{"rollout"} for _ in self._awake]
        self.decisions = []
        self.scheduler.new_step()
        self._know(rounds)
        left = deque(rounds)

        def begin() -> None:
            if left:
                number, batches = len(rounds) - len(left), left.popleft()
                self.scheduler.begin(split, moves, len(batches))
                self._decide()
                for device in range(split.rollout, split.rollout + split.judge):  # judges wake while others sample
                    judge = self.scheduler.judges.at_first(device, split.judge)
                    ready = SimulatedTask("train", 0.0, _nothing, device, to="judge", judge=judge, at=(number, device))
                    self._put(ready)

                def then() -> None:
                    self._then(self.pause(number + 1), begin)

                if coming is None or number:
                    self._round(batches, then, number)
                else:
                    self._claimed(coming, then)

        self._then(self.pause(0), begin)

    def _know(self, rounds: Rounds) -> None:
        self.scheduler.judges.know(judge for one in rounds for batch in one for judge, _ in batch.judges)

    def apart(self, split: Split, moves: Moves = "never") -> None:
        """``Scheduler.apart`` of the real scheduler; the first time every device has its role."""
        first = not self.scheduler.ahead
        self.scheduler.apart(split, moves)
        if first:
            judges = self.scheduler.judges.of
            self._last = list(self.scheduler.roles)
            self._awake = [{f"judge {judges[n]}" if role == "judge" else role} for n, role in enumerate(self._last)]
        self._decide()

    def warm(self) -> None:
        """Every device that samples ahead has had all judges, which it keeps."""
        for awake in self._awake:
            awake |= {f"judge {name}" for name in self.scheduler.judges.names or [""]}

    def lend(self, step: int) -> None:
        self.scheduler.lend(step)
        self._decide()

    def recall(self, then: Callable[[], None]) -> None:
        """``Scheduler.recall`` of the real scheduler; ``then`` is called when all devices that train are back."""
        self.scheduler.recall()
        trainers = [device for device, role in enumerate(self.scheduler.roles) if role == "train"]
        back = _last_of(len(trainers), then)
        for device in trainers:
            self._put(SimulatedTask("train", 0.0, back, device, to="train"))

    def rounds_ahead(self, step: int, rounds: Rounds, then: Callable[[], None]) -> None:
        """Add the work of ``step`` for devices that have fixed roles; ``then`` is called when all is judged."""
        left = deque(rounds)
        self._know(rounds)

        def begin() -> None:
            if left:
                self._round(left.popleft(), begin, len(rounds) - len(left) - 1, ahead=step)
            else:
                then()

        begin()

    def _round(
        self, batches: list[MicroBatch], then: Callable[[], None], number: int, *, ahead: int | None = None
    ) -> None:
        """Add a round's micro-batches, ``ahead``: of this step; ``then`` is called when all are judged."""
        judged = _last_of(len(batches), then)
        of = None if ahead is None else (ahead, number)
        for n, batch in enumerate(batches):
            at = (number, n)
            sampled = partial(self._score, batch, judged, at, of)
            self._put(SimulatedTask("rollout", batch.sampling, sampled, updates=ahead, of=of, at=at))

    def _score(
        self, batch: MicroBatch, then: Callable[[], None], at: tuple[int, int], of: tuple[int, int] | None = None
    ) -> None:
        """A micro-batch is sampled; ``then`` is called when it is judged and the rewards outside have answered."""
        ended = _last_of(max(1, len(batch.parts) + len(batch.calls)), then)
        for judge, seconds in batch.parts:
            self._put(SimulatedTask("judge", seconds, ended, of=of, judge=judge, at=at))
        for call in batch.calls:
            began, until = self._calls.answered(call, self.time.now)
            self.time.after(until - self.time.now, partial(self._called, call, began, of, ended))
        if not batch.parts and not batch.calls:
            ended()

    def _called(self, call: Call, began: float, of: tuple[int, int] | None, then: Callable[[], None]) -> None:
        self.scheduler.called(call, began, self.time.now, of)
        then()

    def _claimed(self, coming: Claimed, then: Callable[[], None]) -> None:
        """Simulate ``mmrl.placement.claimed.drawn``; ``then`` is called when all are judged."""
        number, sampling, working = 0, 0, 0

        def refill() -> None:
            nonlocal number, sampling, working
            coming.tell(*self.scheduler.open_work())
            while sampling < ahead(len(self.scheduler.roles)) and (batch := coming.next()) is not None:
                sampling, working = sampling + 1, working + 1
                at = (0, number)
                self._put(SimulatedTask("rollout", batch.sampling, partial(sampled, batch, at), at=at))
                number += 1
                self.scheduler.comes(coming.left)
                coming.tell(*self.scheduler.open_work())
            self.scheduler.comes(coming.left)
            self._decide()

        def sampled(batch: MicroBatch, at: tuple[int, int]) -> None:
            nonlocal sampling
            sampling -= 1
            refill()
            self._score(batch, judged, at)

        def judged() -> None:
            nonlocal working
            working -= 1
            refill()
            if not working:
                then()

        refill()

    def _put(self, task: SimulatedTask) -> None:
        self._then(self.waits(task), partial(self._ready, task))

    def _ready(self, task: SimulatedTask) -> None:
        self.scheduler.ready(task)
        self._decide()

    def _decide(self) -> None:
        for device, task in self.scheduler.handed():
            turn = self._turn(device, task)
            self.decisions.append((device, task.role, task.at))
            times = self.times(device, task, turn)
            whole = times.begins + times.turns + times.works + times.ends
            self.time.after(whole, partial(self._done, device, task, times, self.time.now))

    def _turn(self, device: int, task: SimulatedTask) -> float:
        """Have the task's role on the device; returns the seconds of the switch.

        A device that trains keeps a judge that it has, and the weights to sample with until it is back.
        """
        role, awake = task.to or task.role, self._awake[device]
        judges = [task.judge] if task.judge else self.scheduler.judges.names or [""]
        needed = {f"judge {name}" for name in judges} if role == "judge" else {role}
        if self.scheduler.roles[device] != "train":
            if self.scheduler.ahead:
                return self._moved(device, role, needed, task.updates)
            kept = {one for one in awake if role == "judge" and one.startswith("judge")}
            self._awake[device] = needed if self.scheduler.judges.alone else needed | kept
            return 0.0 if needed <= awake else self._price[role]
        if role == "train":
            lent = "rollout" in awake
            awake.discard("rollout")
            return self._price[role] if lent else 0.0
        turn = 0.0 if needed <= awake else self._price[role]
        awake |= needed
        return turn

    def _moved(self, device: int, role: Role, needed: set[str], updates: int | None) -> float:
        """The ``_turn`` of a device that samples ahead: it keeps the judges that it has had. New weights take time
        only where it comes from judging."""
        last, self._last[device] = self._last[device], role
        if role == "judge":
            turn = 0.0 if needed <= self._awake[device] else self._price[role]
            self._awake[device] |= needed
            return turn
        loaded, self._loaded[device] = self._loaded[device], updates
        return self._price[role] if last == "judge" and loaded != updates else 0.0

    def _done(self, device: int, task: SimulatedTask, times: Times, handed: float) -> None:
        began = handed + times.begins
        turned = began + times.turns
        role = None if task.role == "train" else task.role
        self.scheduler.done(device, role, began, turned, turned + times.works, to=task.to)
        self._decide()
        self._then(times.asks, partial(self._asks, device))
        task.then()

    def _then(self, seconds: float, call: Callable[[], None]) -> None:
        """Call now, or after some seconds."""
        if seconds:
            self.time.after(seconds, call)
        else:
            call()

    def _asks(self, device: int) -> None:
        self.scheduler.idle(device)
        self._decide()


def _nothing() -> None:
    """What follows a task that only switches a device's role."""


def _last_of(count: int, then: Callable[[], None]) -> Callable[[], None]:
    """What each of ``count`` tasks calls when it ends; the last call is passed on to ``then``."""
    left = count

    def ended() -> None:
        nonlocal left
        left -= 1
        if not left:
            then()

    return ended


class SimulatedCalls:
    """Final class. The rewards that a controller calls: the requests of each are answered in the order in which they
    come, ``at_once`` at the same time."""

    def __init__(self) -> None:
        self._free: dict[str, list[float]] = {}
        """When each of a reward's turns is free."""

    def answered(self, call: Call, now: float) -> tuple[float, float]:
        """When a call that comes ``now`` begins to be answered, and when it is answered. Its requests take equally
        long. They take their turns before those of later calls."""
        free = self._free.setdefault(call.reward, [])
        free += [now] * (call.at_once - len(free))
        heapq.heapify(free)
        each, began, ended = call.seconds / call.requests, [], now
        for _ in range(call.requests):
            start = max(now, free[0])
            heapq.heapreplace(free, start + each)
            began.append(start)
            ended = max(ended, start + each)
        return min(began), ended
