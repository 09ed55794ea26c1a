"""The queue of a controller's tasks: the scheduler, driven by the threads of its devices."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mmrl.config.placement import Placement
from mmrl.core.json_types import Json, JsonObject
from mmrl.models.policy import Version
from mmrl.placement.adaptive import Moves, Split
from mmrl.placement.scheduler import Scheduler
from mmrl.placement.scheduler_log import BEGINS, DECIDES, HANDED, MEASURED, Entry
from mmrl.placement.tasks import Call, Role
from mmrl.placement.what_if import measured

R = TypeVar("R")


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
    judge: str = ""
    """The reward that judges."""
    answer: Future[Any] = field(default_factory=Future)
    number: int = field(default_factory=itertools.count().__next__)
    """Of all tasks of this process, for the log."""

    @property
    def updates(self) -> int | None:
        return None if self.version is None else self.version.updates


class TaskQueue:
    """Final class. The controller adds tasks; each device's thread takes them. ``scheduler`` decides who takes what; it
    is used under one lock, and every change is followed by its decisions. ``tell`` and the methods that have the name
    of one of ``Scheduler``'s call it, and write that into the log."""

    def __init__(self, devices: int, settings: Placement) -> None:
        self._now = time.perf_counter()
        self.scheduler: Scheduler[Task] = Scheduler(devices, lambda: self._now, settings)
        self._log: list[Entry] | None = None
        self._handed: dict[int, Task] = {}
        self._failed: BaseException | None = None
        self._changed = threading.Condition()
        self._closed = False
        self.finished = 0
        """Counts what has finished, for ``wait``."""

    def tell(self, call: Callable[..., R], *given: Json) -> R:
        """Call a method of ``scheduler`` that takes JSON data, and write it into the log."""
        with self._heard(call.__name__, *given):
            return call(*given)

    def apart(self, split: Split, moves: Moves = "never") -> None:
        with self._heard("apart", split.rollout, split.judge, moves):
            self.scheduler.apart(split, moves)

    def begin(self, split: Split, moves: Moves, to_come: int, members: Collection[int] = ()) -> None:
        with self._heard("begin", split.rollout, split.judge, moves, to_come, sorted(members)):
            self.scheduler.begin(split, moves, to_come, members)

    def measured(self) -> Scheduler[Task]:
        with self._heard(MEASURED):
            return measured(self.scheduler)

    def keep_log(self, begins: JsonObject) -> None:
        """Write down what the scheduler hears and decides from now on."""
        self._log = []
        self.note(BEGINS, begins)

    def note(self, what: str, *given: Json) -> None:
        """Write an entry into the log, if one is kept."""
        with self._heard(what, *given):
            pass

    def entries(self) -> list[Entry]:
        """The entries of the log since the last call."""
        with self._changed:
            found, self._log = self._log or [], None if self._log is None else []
            return found

    def open_work(self) -> tuple[float, float]:
        with self._changed:
            return self.scheduler.open_work()

    def put(self, task: Task) -> Future[Any]:
        with self._changed:
            if self._failed is not None:
                task.answer.set_exception(self._failed)
            else:
                with self._heard("ready", task.number, task.role, task.device, task.updates, task.of, task.judge):
                    self.scheduler.ready(task)
        return task.answer

    def take(self, device: int) -> Task | None:
        """Wait for the next task of this device; None after the queue is closed."""
        with self._changed:
            with self._heard("idle", device):
                self.scheduler.idle(device)
            while not self._closed:
                if device in self._handed:
                    return self._handed.pop(device)
                self._changed.wait()
            return None

    def done(
        self,
        device: int,
        role: Role | None,
        began: float,
        turned: float,
        ended: float,
        *,
        priced: bool = True,
        to: Role | None = None,
    ) -> None:
        """Record a finished task, as ``Scheduler.done``."""
        with self._heard("done", device, role, began, turned, ended, priced, to):
            self.scheduler.done(device, role, began, turned, ended, priced=priced, to=to)
        self.hear()

    def called(self, call: Call, began: float, ended: float, of: tuple[int, int] | None) -> None:
        with self._heard("called", [*call], began, ended, of):
            self.scheduler.called(call, began, ended, of)

    def hear(self) -> None:
        """Something has finished."""
        with self._changed:
            self.finished += 1
            self._changed.notify_all()

    def wait(self, seen: int) -> None:
        """Wait until something has finished after ``finished`` was ``seen``."""
        with self._changed:
            self._changed.wait_for(lambda: self.finished != seen)

    @property
    def at_work(self) -> bool:
        """Whether samples are drawn or judged, or wait for it."""
        with self._changed:
            return self.scheduler.at_work

    def fail(self, device: int, error: BaseException) -> None:
        """The device takes no more tasks because of ``error``; all waiting and future answers raise it."""
        with self._heard("withdraw"):
            self._failed = error
            left = [self.scheduler.taken[device], *self.scheduler.withdraw()]
        for task in left:  # outside the lock: the waiting thread may add the next one
            if task is not None:
                with suppress(InvalidStateError):
                    task.answer.set_exception(error)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextmanager
    def _heard(self, what: str, *given: Json) -> Generator[None]:
        """Hold the lock while the scheduler hears of ``what``, at one time, and hands out its decisions."""
        with self._changed:
            self._now = time.perf_counter()
            self._write(what, *given)
            yield
            if what in DECIDES:
                self._decide()

    def _write(self, what: str, *given: Json) -> None:
        if self._log is not None:
            self._log.append([self._now, what, *given])

    def _decide(self) -> None:
        """Hand out the scheduler's decisions, under the lock."""
        handed = self.scheduler.handed()
        if handed:
            self._write(HANDED, [[device, task.number] for device, task in handed])
            self._handed.update(handed)
            self._changed.notify_all()
