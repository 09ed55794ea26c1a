"""What the scheduler knows of a task, and what it keeps of it. Imports no torch."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

Role = Literal["rollout", "judge", "train"]


class Schedulable(Protocol):
    """A task of the scheduler."""

    @property
    def role(self) -> Role: ...

    @property
    def device(self) -> int | None:
        """The device that must do it; None for any device of its role."""
        ...

    @property
    def updates(self) -> int | None:
        """The number of updates of the weights that it samples with, if the devices sample for later steps."""
        ...

    @property
    def of(self) -> tuple[int, int] | None:
        """The step and round it belongs to, if devices also work for later steps; None means the current ones."""
        ...

    @property
    def judge(self) -> str:
        """The reward that judges, where it is a task of judging; else empty."""
        ...


class Call(NamedTuple):
    """A call of a reward that computes outside of the devices: its requests, their seconds together, and how many of
    the reward's requests are made at the same time."""

    reward: str
    requests: int
    seconds: float
    at_once: int


class Event(NamedTuple):
    """A role of device ``device`` between two moments, in seconds after the start of the step; or, on no device (-1), a
    ``call``."""

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
    call: Call | None = None
    judge: str = ""
    """Which of several judges; empty where there is one."""


class StepEvents(list[Event]):
    """Final class: the events of a step."""

    def seconds(self, role: str) -> float:
        """Device-seconds spent in a role."""
        return sum(event.ended - event.began for event in self if event.role == role)

    def done_after(self, *roles: str) -> float:
        """Seconds from the first sampling to the end of the last work in any of ``roles``; 0 if there was none."""
        first = min((event.began for event in self if event.role == "rollout"), default=0.0)
        return max((event.ended - first for event in self if event.role in roles), default=0.0)


LENT: tuple[Role, ...] = ("rollout", "judge")
"""The roles that a device which trains is lent to, in the order in which it looks for work."""


def recent(before: float, now: float) -> float:
    """A mean in which the latest value counts most; ``before`` 0: there is none yet."""
    return now if not before else 0.7 * before + 0.3 * now


def is_for(task: Schedulable, step: int) -> bool:
    """Whether ``step`` waits for the task."""
    return task.of is None or task.of[0] <= step


def trains(task: Schedulable) -> int:
    """The step that trains on the task's result; -1 for the current one."""
    return -1 if task.of is None else task.of[0]


def trains_later(task: Schedulable, other: Schedulable) -> bool:
    """Whether ``task`` is for a step that is trained later than that of ``other``."""
    return trains(task) > trains(other)


def needs_newer_weights(task: Schedulable, other: Schedulable) -> bool:
    """Whether ``task`` needs newer weights than ``other``, for a step that is trained later."""
    mine, theirs = task.updates, other.updates
    return mine is not None and theirs is not None and mine > theirs
