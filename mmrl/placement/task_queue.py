"""The queue of sampling and judging tasks of a controller's devices in the generate phase.

A device works in one role at a time. It keeps its role while there is work in it; without work it may switch to the
other role, if the placement allows it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from mmrl.engines.policy import Version
from mmrl.placement.adaptive import Split, worth_moving

Role = Literal["rollout", "judge", "train"]
Moves = Literal["never", "after", "worth"]
"""When a device switches its role within a phase: never (except if no device is left for the work), after all sampling
has ended (colocate), or when that saves more time than it costs."""


@dataclass(frozen=True, eq=False)
class Task:
    """A call of ``call``, a function of a module, by any device of its role, or only by ``device``."""

    role: Role
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    features: dict[str, Any] = field(default_factory=dict)
    device: int | None = None
    version: Version | None = None
    """The weights to sample with, if the device does not train."""
    of: tuple[int, int] | None = None
    """The step and round it belongs to, if devices also work for later steps; None means the current ones."""
    answer: Future[Any] = field(default_factory=Future)

    @property
    def name(self) -> str:
        return self.call.__name__


@dataclass(frozen=True)
class Event:
    """A role of device ``device`` between two moments, in seconds after the start of the step."""

    device: int
    role: str
    began: float
    ended: float
    round: int = 0
    """The round of dynamic sampling, or of partial rollout."""
    of: int | None = None
    """The step it belongs to, if that may be a later one."""
    cut: bool = False
    """Whether it continues in the next step."""
    priced: bool = True
    """For a role switch: whether a switch within a phase would take as long."""


class TaskQueue:
    """Final class. The controller adds tasks; each device's thread takes them."""

    def __init__(self, devices: int) -> None:
        self.roles: list[Role] = ["rollout"] * devices
        self.events: list[Event] = []
        self.moves = 0
        self.price = 0.0
        """Seconds that recent role switches took."""
        self._tasks: dict[Role, deque[Task]] = {"rollout": deque(), "judge": deque(), "train": deque()}
        self._running: list[Role | None] = [None] * devices
        self._taken: list[Task | None] = [None] * devices
        self._failed: BaseException | None = None
        self._since = [0.0] * devices
        self._seconds: dict[Role, float] = {}
        self._to_come = 0
        self._moves: Moves = "after"
        self._changed = threading.Condition()
        self._closed = False
        self._round = -1
        self._start = time.perf_counter()

    def new_step(self) -> None:
        """Discard the events of the last step; times are measured from now on."""
        with self._changed:
            self.events, self.moves, self._start = [], 0, time.perf_counter()
            self._round = -1

    def apart(self, split: Split) -> None:
        """From now on the first devices train, the next ones sample and the last ones judge, whatever the load."""
        with self._changed:
            n, judging = len(self.roles), len(self.roles) - split.judge
            sampling = judging - split.rollout
            self.roles = ["judge" if d >= judging else "rollout" if d >= sampling else "train" for d in range(n)]
            self._moves = "never"

    def cut(self) -> None:
        """Count the unfinished work of samplers and judges so far for this step, which ends while they work."""
        with self._changed:
            now = time.perf_counter()
            for device, role in enumerate(self._running):
                if role in ("rollout", "judge"):
                    began, (of, number) = self._after(self._since[device]), self._for(device)
                    self.events.append(Event(device, role, began, self._after(now), number, of, cut=True))
                    self._since[device] = now

    def begin(self, split: Split, moves: Moves, to_come: int) -> None:
        """Start a generate phase of ``to_come`` micro-batches: the first devices sample, the last ones judge."""
        with self._changed:
            self.roles = ["judge" if d >= split.rollout else "rollout" for d in range(len(self.roles))]
            self._moves, self._to_come = moves, to_come
            self._round += 1
            self._changed.notify_all()

    def put(self, task: Task) -> Future[Any]:
        with self._changed:
            if self._failed is not None:
                task.answer.set_exception(self._failed)
                return task.answer
            tasks = self._tasks[task.role]
            tasks.insert(next((n for n, other in enumerate(tasks) if _later(other, task)), len(tasks)), task)
            if task.role == "rollout":
                self._to_come -= 1
            self._changed.notify_all()
        return task.answer

    def drop(self, role: Role) -> None:
        """Discard the waiting tasks of a role."""
        with self._changed:
            self._tasks[role].clear()

    def take(self, device: int) -> Task | None:
        """Wait for the next task of this device; None after the queue is closed."""
        with self._changed:
            while not self._closed:
                task = self._own(device) or self._next(device)
                if task is not None:
                    self._running[device], self._since[device] = task.role, time.perf_counter()
                    self._taken[device] = task
                    return task
                self._changed.wait()
            return None

    def done(
        self, device: int, role: Role | None, began: float, turned: float, ended: float, *, priced: bool = True
    ) -> None:
        """Record a finished task: the device switched to ``role`` between ``began`` and ``turned``, and then worked in
        it; None for bookkeeping. ``priced``: a switch within a phase would take as long."""
        with self._changed:
            self._running[device] = None
            if turned > began:
                self.price = _recent(self.price, turned - began) if priced else self.price
                self.events.append(Event(device, "wake", self._after(began), self._after(turned), priced=priced))
            if role is not None:
                since, (of, number) = max(turned, self._since[device]), self._for(device)  # the cut part is counted
                until = max(ended, since)
                self.events.append(Event(device, role, self._after(since), self._after(until), number, of))
                self._seconds[role] = _recent(self._seconds.get(role, 0.0), ended - turned)
            self._changed.notify_all()

    def fail(self, device: int, error: BaseException) -> None:
        """The device takes no more tasks because of ``error``; all waiting and future answers raise it."""
        with self._changed:
            self._failed = error
            left = [self._taken[device], *(task for tasks in self._tasks.values() for task in tasks)]
            for tasks in self._tasks.values():
                tasks.clear()
        for task in left:  # outside the lock: the waiting thread may add the next one
            if task is not None:
                with suppress(InvalidStateError):
                    task.answer.set_exception(error)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def seconds(self, role: str) -> float:
        """Device-seconds spent in a role since the step began."""
        return sum(e.ended - e.began for e in self.events if e.role == role)

    def done_after(self, role: str) -> float:
        """Seconds from the first sampling of the step to the end of the last work in a role; 0 if there was none."""
        first = min((e.began for e in self.events if e.role == "rollout"), default=0.0)
        return max((e.ended - first for e in self.events if e.role == role), default=0.0)

    @property
    def elapsed(self) -> float:
        """Seconds since the start of the step."""
        return time.perf_counter() - self._start

    def _for(self, device: int) -> tuple[int | None, int]:
        """The step (None for the current one) and the round of a device's current task."""
        task = self._taken[device]
        return (None if task is None else task.of) or (None, self._round)

    def _after(self, moment: float) -> float:
        """Seconds after the start of the step; 0 for an earlier moment."""
        return max(0.0, moment - self._start)

    def _own(self, device: int) -> Task | None:
        tasks = self._tasks["train"]
        mine = next((task for task in tasks if task.device == device), None)
        if mine is not None:
            tasks.remove(mine)
        return mine

    def _next(self, device: int) -> Task | None:
        role = self.roles[device]
        if role == "train":
            return None
        if self._tasks[role]:
            return self._tasks[role].popleft()
        other: Role = "judge" if role == "rollout" else "rollout"
        if not self._tasks[other] or not self._may_turn(role, other):
            return None
        self.roles[device] = other
        self.moves += 1
        return self._tasks[other].popleft()

    def _may_turn(self, role: Role, other: Role) -> bool:
        """Whether a device without work in its role switches to the other role, which has work."""
        sampling = self._to_come or self._tasks["rollout"] or "rollout" in self._running
        if self._moves == "after":
            return not sampling
        there = sum(r == other for r in self.roles)
        if not there and not (role == "rollout" and self._to_come):
            return True
        if self._moves == "never":
            return False
        left = len(self._tasks[other]) * self._seconds.get(other, 0.0)
        if other == "rollout":
            left += self._to_come * self._seconds.get(other, 0.0)
        own = 0.0
        if role == "judge" and sampling:
            own = (self._to_come + len(self._tasks["rollout"])) * self._seconds.get("judge", 0.0)
        return worth_moving(own, left, there, self.price, sum(r == role for r in self.roles) - 1)


def _later(task: Task, other: Task) -> bool:
    """Whether ``task`` needs newer weights than ``other``, for a step that is trained later."""
    mine, theirs = task.version, other.version
    return mine is not None and theirs is not None and mine.updates > theirs.updates


def _recent(before: float, now: float) -> float:
    return now if not before else 0.7 * before + 0.3 * now


def as_rows(events: Sequence[Event], step: int, controller: int) -> list[dict[str, Any]]:
    """The lines of placement.jsonl; ``step`` counts from 1."""
    return [
        {
            "step": step,
            "controller": controller,
            "device": e.device,
            "role": e.role,
            "began": round(e.began, 4),
            "ended": round(e.ended, 4),
            **({"of": e.of + 1} if e.of is not None and e.of + 1 != step else {}),
            **({"round": e.round} if e.round > 0 else {}),
            **({"cut": True} if e.cut else {}),
            **({} if e.priced else {"priced": False}),
        }
        for e in events
    ]
