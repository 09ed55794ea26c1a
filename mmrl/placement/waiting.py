"""The tasks that wait for a controller's devices. Imports no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Generic, TypeVar

from mmrl.placement.tasks import LENT, Role, Schedulable, is_for, needs_newer_weights, trains, trains_later

T = TypeVar("T", bound=Schedulable)


class Waiting(Generic[T]):
    """Final class: the tasks of sampling and of judging for any device, by role, and those of training, by device.
    ``by_step``: whether tasks of a role are in the order in which their steps are trained."""

    def __init__(self, devices: int) -> None:
        self.by_step = False
        self.own: list[deque[T]] = [deque() for _ in range(devices)]
        self._of: dict[Role, deque[T]] = {role: deque() for role in LENT}
        self._owned = 0

    def __getitem__(self, role: Role) -> deque[T]:
        return self._of[role]

    def __bool__(self) -> bool:
        return bool(self._owned) or self.any()

    def any(self) -> bool:
        """Whether something waits to be sampled or judged."""
        return any(self._of.values())

    def add(self, task: T) -> None:
        """Raises ``ValueError`` for a task of training without a device."""
        if task.role == "train":
            if task.device is None:
                raise ValueError("a task of training has a device of its own")
            self.own[task.device].append(task)
            self._owned += 1
            return
        tasks, later = self._of[task.role], trains_later if self.by_step else needs_newer_weights
        if tasks and later(tasks[-1], task):
            tasks.insert(next(n for n, other in enumerate(tasks) if later(other, task)), task)
        else:
            tasks.append(task)

    def next_own(self, device: int) -> T:
        """The device's next task of training, out of the queue."""
        self._owned -= 1
        return self.own[device].popleft()

    def take(self, role: Role, place: int) -> T:
        """A task out of the queue."""
        task = self._of[role][place]
        del self._of[role][place]
        return task

    def steps(self) -> list[int]:
        """The steps of the first tasks, that which trains next first."""
        return sorted({trains(tasks[0]) for tasks in self._of.values() if tasks})

    def first_for(self, role: Role, step: int | None) -> bool:
        """Whether ``step`` (None: any) waits for the first task of a role."""
        tasks = self._of[role]
        return bool(tasks) and (step is None or is_for(tasks[0], step))

    def wanted(self, role: Role, step: int | None) -> int:
        """The number of waiting tasks of a role that ``step`` waits for; None: of all."""
        tasks = self._of[role]
        if step is None or not tasks:
            return len(tasks)
        return bisect_right(tasks, step, key=trains) if self.by_step else sum(is_for(task, step) for task in tasks)

    def drop(self, role: Role) -> None:
        """Discard the tasks of a role."""
        for tasks in self.own if role == "train" else [self._of[role]]:
            tasks.clear()
        self._owned = sum(map(len, self.own))

    def withdraw(self) -> list[T]:
        """Discard all tasks, and return them."""
        left = [task for tasks in (*self._of.values(), *self.own) for task in tasks]
        for role in (*LENT, "train"):
            self.drop(role)
        return left
