"""Devices that sleep for given seconds where others compute: a real run of placement with almost no work.

``SleepingDevices`` is ``MultiDevice`` with its threads, queue, futures, role switches and decisions. Only what a device
computes is replaced by a sleep. ``Replayed`` goes through the same tasks in simulated time, with the times that were
recorded of the real ones. With ``placement.log`` the lines have what the scheduler heard and when; a new scheduler
decides the same from it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch

from mmrl.config.placement import Placement
from mmrl.core.clock import Clock
from mmrl.core.reward_contract import Asked
from mmrl.models.policy import Version
from mmrl.placement import device_tasks, lending
from mmrl.placement.adaptive import State, opening
from mmrl.placement.multi_device import MultiDevice
from mmrl.placement.scheduler_log import Replay, replay
from mmrl.placement.simulated_devices import MicroBatch, Rounds, SimulatedDevices, SimulatedTask, Times
from mmrl.placement.task_queue import Task
from mmrl.placement.tasks import Call
from mmrl.rewards.returned import Answer

Key = tuple[str, tuple[int, int]]
"""The role of a task, and its round and micro-batch."""


@dataclass
class Record:
    """What happened in a step of real devices, in seconds of one clock."""

    decisions: list[tuple[int, str, tuple[int, int]]] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    """The start of the step, and the begin of each round."""
    ready: dict[Key, float] = field(default_factory=dict)
    handed: dict[Key, float] = field(default_factory=dict)
    done: dict[Key, tuple[float, float, float, float]] = field(default_factory=dict)
    """When the device began, had switched its role, had worked, and when the scheduler heard of that."""
    asked: dict[Key, float] = field(default_factory=dict)

    def measured(self, rounds: Rounds) -> Rounds:
        """The work with the seconds that it took."""

        def seconds(role: str, at: tuple[int, int]) -> float:
            _, turned, worked, _ = self.done[(role, at)]
            return worked - turned

        return [
            [
                MicroBatch(seconds("rollout", (k, n)), seconds("judge", (k, n)) if batch.judging else 0.0, batch.calls)
                for n, batch in enumerate(one)
            ]
            for k, one in enumerate(rounds)
        ]


class SleepingCalls:
    """A reward outside of the devices, whose requests sleep, ``at_once`` of them at the same time."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def submit(self, call: Call, context: Any) -> Future[Answer]:
        self._threads = self._threads or ThreadPoolExecutor(call.at_once)
        answer: Future[Answer] = Future()
        spans = [self._threads.submit(_slept, call.seconds / call.requests) for _ in range(call.requests)]

        def heard() -> None:
            found = [span.result() for span in spans]
            asked = Asked(call.requests, sum(ended - began for began, ended in found), call.at_once)
            began, ended = min(began for began, _ in found), max(ended for _, ended in found)
            answer.set_result(Answer([], [], began=began, ended=ended, asked=asked))

        Thread(target=heard, daemon=True).start()
        return answer

    def close(self) -> None:
        pass


def _slept(seconds: float) -> tuple[float, float]:
    began = time.perf_counter()
    time.sleep(seconds)
    return began, time.perf_counter()


class SleepingDevices(MultiDevice):
    """``devices`` of one controller; a switch of roles takes ``price`` seconds. ``leaders``: those that ask a server on
    several devices, and on how many. ``judges``: the labels of those that judge on devices."""

    def __init__(
        self,
        devices: int,
        settings: Placement,
        price: float,
        leaders: Mapping[int, int] | None = None,
        judges: Sequence[str] = ("judge",),
    ) -> None:
        others: Any = [SimpleNamespace(close=lambda: None)] * (devices - 1)
        super().__init__(others, settings, leaders=leaders)
        self.performed: list[tuple[int, str, str]] = []
        """Of every task: the device, its name, and the role that it switches to."""
        self._price, self._judges = price, judges
        self._clients: dict[str, Any] = {}
        self._outside: Any = None
        self.record = Record()
        self._number = 0
        self._training = 0.0
        self.slept: dict[tuple[str, int, tuple[int, int]], float] = {}
        """Of ``run_ahead``: the seconds of each task, by its role, step, and round and micro-batch."""
        self.decided: list[float] = []
        """Of ``run_ahead``: the seconds from the end of each step's training until the next step may train."""
        self._lent: set[int] = set()
        self._latest: dict[int, Key] = {}
        self._did: dict[int, str] = {}
        """What each device did last."""
        self.context: Any = SimpleNamespace(
            rewards=SimpleNamespace(on_device=[*judges], call_by=self._called_by),
            recipe=SimpleNamespace(threads=None, rollout=SimpleNamespace(in_process=True), environment=None),
            pipeline=SimpleNamespace(encode=lambda slots: [], features=SimpleNamespace(release=lambda keys: None)),
            controller=SimpleNamespace(gather=lambda mine: [mine], rank=0),
            policy=SimpleNamespace(weights=SimpleNamespace(width=1, stages=None, lockstep=False)),
        )
        self.written: list[Any] = []
        """The lines of placement.jsonl of all steps."""
        self._listen()
        self.open(self.context)

    def run_step(self, step: int, rounds: Rounds) -> float:
        """A step with this work; returns the seconds of its generate phase."""
        self.record = Record()
        self.begin_step()
        while len(self._board.scheduler.waiting) < self._count:
            time.sleep(0.0005)
        self.record.began.append(self._board.scheduler.start)
        for number, batches in enumerate(rounds):
            self._number = number
            chunks = [
                SimpleNamespace(slots=[], seconds=both, step=step, at=(number, n)) for n, both in enumerate(batches)
            ]
            judged: list[Any] = []
            how: Any = SimpleNamespace(evaluate=False, step=step, round=number)
            for _, chunk, _ in self.sample(self.context, chunks, how, Clock(torch.device("cpu"))):  # type: ignore[arg-type]
                judged += self._scored(chunk, step, number)
            for answer in judged:
                answer.result()
        self.map_micro_batches(self.context, device_tasks.gpu, [])  # an update without slices
        self.run_on_trainers(self.context, device_tasks.apply, 0.0)
        seconds = self._board.scheduler.events.done_after("rollout", "judge", "call")
        self.end_step(self.context, step)
        self.written += self.lines()
        return seconds

    def _scored(self, chunk: Any, step: int, number: int) -> list[Any]:
        """The answers to come of all that scores a micro-batch."""
        context: Any = SimpleNamespace(step=step, sent=Counter(), round=number, label="outside")
        judged = [self._clients[name or self._judges[0]].submit([chunk], context) for name, _ in chunk.seconds.parts]
        return judged + [self._outside.submit(call, context) for call in chunk.seconds.calls]

    def replayed(self) -> Replay:
        """Another scheduler and policy, which have heard what the log of the steps has."""
        return replay(json.loads(json.dumps(self.written)), self.settings)[0]

    def measured(self, step: int, rounds: Rounds) -> Rounds:
        """The work of a step of ``run_ahead`` with the seconds that it took."""
        return [
            [
                MicroBatch(
                    self.slept["rollout", step, (k, n)], self.slept.get(("judge", step, (k, n)), 0.0), batch.calls
                )
                for n, batch in enumerate(one)
            ]
            for k, one in enumerate(rounds)
        ]

    def run_ahead(self, steps: Sequence[Rounds], training: Sequence[float], staleness: int) -> list[float]:
        """Steps that are sampled ahead, as ``AsyncRollout`` does; returns the seconds until each was trained."""
        begun: dict[int, Any] = {}
        ends, start = [], time.perf_counter()
        with ThreadPoolExecutor(staleness + 1) as threads:
            for step, self._training in enumerate(training):
                self.begin_step()
                for n in range(step, min(step + staleness, len(steps) - 1) + 1):
                    if n not in begun:
                        first = self._submitted(n, 0, steps[n][0], staleness)
                        begun[n] = threads.submit(self._collected, n, first, steps[n], staleness)
                with self.lending(self.context, step):
                    begun.pop(step).result()
                self.run_on_trainers(self.context, device_tasks.apply, 0.0)
                ends.append(time.perf_counter() - start)
                self.end_step(self.context, step)
                self.written += self.lines()
                self.decided.append(time.perf_counter() - start - ends[-1])
        return ends

    def _submitted(self, step: int, number: int, batches: Any, staleness: int) -> Any:
        chunks: Any = [
            SimpleNamespace(slots=[], seconds=both, step=step, at=(number, n)) for n, both in enumerate(batches)
        ]
        how: Any = SimpleNamespace(evaluate=False, step=step, round=number)
        version = Version(max(0, step - staleness), "current", {})
        return self.sample(self.context, chunks, how, Clock(torch.device("cpu")), version)

    def _collected(self, step: int, drawn: Any, rounds: Rounds, staleness: int) -> None:
        for number, batches in enumerate(rounds):
            judged: list[Any] = []
            for _, chunk, _ in drawn if number == 0 else self._submitted(step, number, batches, staleness):
                judged += self._scored(chunk, step, number)
            for answer in judged:
                answer.result()

    def _called_by(self, made: Any, outside: Any) -> None:
        self._clients = {name: made(name) for name in self._judges}
        self._outside = outside(SleepingCalls())

    def _perform(self, context: Any, device: int, task: Task) -> Any:
        switched = task.call is device_tasks.switch_role
        words = " ".join(filter(None, map(str, task.arguments[::2]))) if switched else ""
        self.performed.append((device, task.call.__name__, words))
        if task.call is lending.lent:
            task = Task(task.role, *task.arguments)
        if task.call is device_tasks.load_version and self._did.get(device) == "judge":
            time.sleep(self._price)  # it moves
        if task.call is lending.borrow:
            self._lent.add(device)
            time.sleep(self._price)
        if task.call is lending.give_back and device in self._lent:
            self._lent.remove(device)
            time.sleep(self._price)
        if task.call is device_tasks.apply:
            time.sleep(self._training)
        if task.call is device_tasks.sample:
            self._did[device] = "rollout"
            self._sleep("rollout", task.arguments[0], task.arguments[0].seconds.sampling)
            return task.arguments[0], []
        if task.call is device_tasks.score:
            chunk = task.arguments[1][0]
            self._did[device] = "judge"
            self._sleep("judge", chunk, dict(chunk.seconds.judges).get(task.judge, chunk.seconds.judging))
            return SimpleNamespace(sent=Counter())
        if task.call is device_tasks.switch_role:
            time.sleep(self._price if task.arguments[0] != "train" else 0.0)
            return False
        return 0.0 if task.call is device_tasks.cpu_seconds else None

    def _sleep(self, role: str, chunk: Any, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        self.slept[role, chunk.step, chunk.at] = time.perf_counter() - began

    def _listen(self) -> None:
        """Record what the scheduler hears and decides; all under the lock of the queue."""
        scheduler = self._board.scheduler
        begin, ready, handed, done, idle = (
            getattr(scheduler, name) for name in ("begin", "ready", "handed", "done", "idle")
        )

        def begins(*given: Any) -> None:
            self.record.began.append(time.perf_counter())
            begin(*given)

        def is_ready(task: Task) -> None:
            if (key := self._key(task, task.device)) is not None:
                self.record.ready[key] = time.perf_counter()
            ready(task)

        def hands() -> list[tuple[int, Task]]:
            found = handed()
            for device, task in found:
                if (key := self._key(task, device)) is not None:
                    self._latest[device] = key
                    self.record.handed[key] = scheduler.since[device]
                    self.record.decisions.append((device, *key))
            return found

        def is_done(device: int, role: Any, began: float, turned: float, ended: float, **how: Any) -> None:
            if device in self._latest:
                self.record.done[self._latest[device]] = began, turned, ended, time.perf_counter()
            done(device, role, began, turned, ended, **how)

        def asks(device: int) -> None:
            if (key := self._latest.pop(device, None)) is not None:
                self.record.asked[key] = time.perf_counter()
            idle(device)

        for name, call in (
            ("begin", begins),
            ("ready", is_ready),
            ("handed", hands),
            ("done", is_done),
            ("idle", asks),
        ):
            setattr(scheduler, name, call)

    def _key(self, task: Task, device: int | None) -> Key | None:
        if task.call is device_tasks.sample:
            return "rollout", task.arguments[0].at
        if task.call is device_tasks.score:
            return "judge", task.arguments[1][0].at
        return ("train", (self._number, device or 0)) if task.call is device_tasks.ready else None


class Replayed(SimulatedDevices):
    """Simulated devices that take the times of ``record`` for every task."""

    record = Record()
    _origin = 0.0

    def times(self, device: int, task: SimulatedTask, turn: float) -> Times:
        key = (task.role, task.at)
        began, turned, worked, heard = self.record.done[key]
        asks = self.record.asked[key] - heard
        return Times(self._until(began), turned - began, worked - turned, heard - worked, asks)

    def waits(self, task: SimulatedTask) -> float:
        return self._until(self.record.ready[(task.role, task.at)])

    def pause(self, number: int) -> float:
        return self._until(self.record.began[1 + number]) if number + 1 < len(self.record.began) else 0.0

    def _until(self, moment: float) -> float:
        return max(moment - self._origin - self.time.now, 0.0)

    def replay(self, record: Record, rounds: Rounds, state: State) -> None:
        """A step of ``rounds`` that took place as in ``record``."""
        self.record, self._origin = record, record.began[0] - self.time.now
        self.step(rounds, *opening(state, judged=True))
