"""Several devices of a controller: one thread per device takes tasks from the queue, for this process or a worker.

Results do not depend on which device computes a micro-batch or a slice. Free devices take sampling and judging tasks
from the queue; the slices of an update are divided beforehand by size, so that sums are added in the same order each
time.

Several devices that train may share a server. The leader of such a replica asks its server for samples or verdicts. Its
other devices, the members, get no task of a generate phase; they only make room: before the server wakes they free what
torch keeps, and before they train the server sleeps.

Rewards are called on devices that judge, or outside of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from threading import Thread
from typing import Any, Protocol

import torch

from mmrl.algorithms.objective import copies_of
from mmrl.config.placement import Placement
from mmrl.core import notices
from mmrl.core.checkpoint_reader import PartState, Saved
from mmrl.core.clock import Clock
from mmrl.core.json_types import JsonObject
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample, TextRows
from mmrl.models.policy import Version
from mmrl.placement import adaptive, claimed, device_tasks, lending, what_if
from mmrl.placement.adaptive import Moves, Split, State
from mmrl.placement.device_shares import all_of, features_of, needs, split_among
from mmrl.placement.scheduler_log import RESUMES, TRIED
from mmrl.placement.step_records import as_line, as_rows, in_one_line, summed
from mmrl.placement.task_queue import Task, TaskQueue
from mmrl.placement.tasks import LENT, Call
from mmrl.rewards.calling import Calls
from mmrl.rewards.returned import Answer
from mmrl.step.batch import MicroBatch
from mmrl.step.step_context import Chunk, ComingChunks, Devices, Drawn, R, SamplingSpec, StepContext, Ts

_SHOWN = ("sample", "sample_beside", "continue_generation", "score", "prepare", "backward", "apply")
"""The tasks that count as work; the others are bookkeeping."""
Put = Callable[[Iterable[int], Callable[..., Any], tuple[Any, ...]], list[Future[Any]]]
"""Give a task to each of some devices."""
For = Callable[[Context], tuple[int, int] | None]
"""The step and round that samples are judged for, if that may be later than the step in training."""
_SHORT_S = 0.01
"""A shorter call is not recorded: it delays nothing."""


class RemoteDevice(Protocol):
    """A controller's handle of a device in another process."""

    def perform(
        self, context: StepContext, call: Callable[..., Any], arguments: tuple[Any, ...], features: Mapping[str, Any]
    ) -> Any:
        """Run ``call`` there and return its result; ``features`` that it lacks are sent."""
        ...

    def close(self) -> None: ...


class MultiDevice(Devices):
    """Final class: the controller's own process and ``workers``, each with a thread that takes tasks.

    With a disaggregated placement the first devices train. The controller waits for the others only to get samples; all
    other messages to them are tasks in the queue.

    ``starting_up()`` is entered while a device switches its role, which has its own deadline.
    """

    def __init__(
        self,
        workers: Sequence[RemoteDevice],
        settings: Placement,
        starting_up: Callable[[], AbstractContextManager[None]] = nullcontext,
        leaders: Mapping[int, int] | None = None,
    ) -> None:
        self._workers, self.settings, self._starting_up = workers, settings, starting_up
        self._count = 1 + len(workers)
        self._replicas = Replicas(leaders or {}, self._count)
        self._trainers = range(settings.training(self._count))
        self._board = TaskQueue(self._count, settings)
        self._threads: list[Thread] = []
        self.state = adaptive.starting(settings, self._count)
        self._lines: list[JsonObject] = []
        self._cpu = self._step_began = 0.0
        self._cpu_of = [0.0] * self._count
        self._version: Version | None = None

    def open(self, context: StepContext) -> None:
        """Start the devices' threads, with this process's ``context``; the devices run the reward models."""
        context.rewards.call_by(
            lambda label: OnDevices(self._board, label, self._for),
            lambda calls: Outside(self._board, calls, self._for),
        )
        self._board.scheduler.judges.know(context.rewards.on_device)
        judged = bool(context.rewards.on_device) or not self.settings.apart
        if self.settings.log:
            placement, names = self.settings.model_dump(mode="json"), [*context.rewards.on_device]
            begins = {"devices": self._count, "judges": names, "judged": judged, "placement": placement}
            self._board.keep_log(begins)
        if self.settings.apart:
            self.state = adaptive.starting(self.settings, self._count, judged=judged)
            self._board.apart(self.state.split, self.state.moves)
        for device in range(self._count):
            thread = Thread(target=self._device, args=(context, device), name=f"mmrl-device-{device}", daemon=True)
            self._threads.append(thread)
            thread.start()

    @contextmanager
    def sampling_phase(self, context: StepContext, weights: str) -> Generator[None]:
        if self.settings.apart:  # the devices that sample have their own weights
            yield
            return
        self.run_on_trainers(context, device_tasks.enter_sampling, weights)
        try:
            yield
        except BaseException:
            self._board.tell(self._board.scheduler.drop, "rollout")  # a round of this phase may be in progress
            raise
        finally:
            self.run_on_trainers(context, device_tasks.leave_sampling)

    def sample(
        self,
        context: StepContext,
        chunks: Iterable[Chunk],
        how: SamplingSpec,
        clock: Clock,
        version: Version | None = None,
    ) -> Iterator[Drawn]:
        together = device_tasks.sharing(context)
        if isinstance(chunks, ComingChunks):
            self._begin(context, how.evaluate, chunks.left)
            return claimed.drawn(self._board, context, chunks, how, clock)
        asked = [(chunk, features_of(context, chunk.slots)) for chunk in chunks]
        if self.settings.apart:
            version = version or self.version(context, how.weights)
        else:
            self._begin(context, how.evaluate, len(asked) * together)
        numbers: dict[Future[Any], int | None] = {}
        for n, (chunk, features) in enumerate(asked):
            if together > 1:
                numbers |= self._drawn_together(n, together, (chunk, how), features)
                continue
            task = Task("rollout", device_tasks.sample, (chunk, how), features, version=version, of=self._for(how))
            numbers[self._board.put(task)] = n
        return self._drawn(numbers, clock)

    def _drawn_together(
        self, n: int, width: int, what: tuple[Chunk, SamplingSpec], features: dict[str, Any]
    ) -> dict[Future[Any], int | None]:
        """Have ``width`` neighbours draw the micro-batch ``n``; the first one's answer has it."""
        leader = n % (len(self._trainers) // width) * width
        answers: dict[Future[Any], int | None] = {}
        for device in range(leader, leader + width):
            call = device_tasks.sample if device == leader else device_tasks.sample_beside
            answers[self._board.put(Task("rollout", call, what, features, device))] = n if device == leader else None
        return answers

    def _for(self, what: SamplingSpec | Context) -> tuple[int, int] | None:
        """The step and round that samples are drawn or judged for, if it may be later than the step in training."""
        return (what.step, what.round) if self.settings.apart and what.step >= 0 else None

    def _begin(self, context: StepContext, evaluate: bool, to_come: int) -> None:
        """Divide the devices for a generate phase."""
        judged = bool(context.rewards.on_device) and not evaluate
        split, moves = self._replicas.begin(self._put, self.state) or adaptive.opening(self.state, judged=judged)
        self._board.begin(split, moves, to_come, members := self._replicas.members)
        if split.judge:  # judges wake while the others sample
            for device in set(range(split.rollout, self._count)).difference(members):
                judge = self._board.scheduler.judges.at_first(device, split.judge)
                self._board.put(Task("train", device_tasks.ready, ("judge",), device=device, judge=judge))

    def _drawn(self, numbers: Mapping[Future[Any], int | None], clock: Clock) -> Iterator[Drawn]:
        """What each answer has, with its number; one without a number has nothing."""
        done = as_completed(numbers)
        for _ in range(len(numbers)):
            with clock("sample"):
                answer = next(done)
                drawn = answer.result()
            if (number := numbers[answer]) is not None:
                yield number, *drawn

    def continue_generation(
        self,
        context: StepContext,
        parts: Sequence[TextRows],
        most: int,
        how: SamplingSpec,
        version: Version | None = None,
    ) -> list[TextRows]:
        assert self.settings.apart  # other placements refuse partial rollout
        version = version or self.version(context, how.weights)
        tasks = [
            Task(
                "rollout",
                device_tasks.continue_generation,
                (p, most, how),
                features_of(context, p.slots),
                version=version,
                of=self._for(how),
            )
            for p in parts
        ]
        return all_of([self._board.put(task) for task in tasks])

    def lending(self, context: StepContext, step: int) -> AbstractContextManager[None]:
        return lending.window(self._board, step, self._trainers) if self.settings.lend else nullcontext()

    def version(
        self, context: StepContext, name: str
    ) -> Version:  # the same object until the weights change; copies change between updates
        same = self._version is not None and self._version.tag == (context.policy.updates, name)
        if self._version is None or not same or name in copies_of(context.objective):
            asked = [self._put([device], device_tasks.version, (name, device == 0))[0] for device in self._trainers]
            self._version = found = all_of(asked)[0]
            return found
        return self._version

    def lockstep_count(self, context: StepContext, n: int) -> int:
        return n  # micro-batches are not divided among devices yet

    def map_micro_batches(
        self,
        context: StepContext,
        task: Callable[[StepContext, Iterable[MicroBatch], *Ts], R],
        micro_batches: Iterable[MicroBatch],
        *arguments: *Ts,
    ) -> list[R]:
        self._replicas.rest(self._put)
        answers, width = [], context.policy.weights.width
        for n, mine in enumerate(split_among(list(micro_batches), context, len(self._trainers) // width)):
            if mine:
                features = features_of(context, [slot for micro_batch in mine for slot in micro_batch.rows.slots])
                devices = range(n * width, (n + 1) * width)
                tasks = [Task("train", task, (mine, *arguments), features, device) for device in devices]
                answers += [self._board.put(task) for task in tasks]
        return all_of(answers)[width - 1 :: width]  # of devices that share a model the last one has the result

    def run_on_trainers(self, context: StepContext, task: Callable[[StepContext, *Ts], R], *arguments: *Ts) -> R:
        return all_of(self._put(self._trainers, task, arguments))[0]

    def run_on_other_trainers(
        self, context: StepContext, task: Callable[[StepContext, *Ts], object], *arguments: *Ts
    ) -> None:
        all_of(self._put(self._trainers[1:], task, arguments))

    @contextmanager
    def running_on_other_trainers(
        self, context: StepContext, task: Callable[[StepContext, *Ts], object], *arguments: *Ts
    ) -> Generator[None]:
        answers = self._put(self._trainers[1:], task, arguments)
        yield
        all_of(answers)

    def begin_step(self) -> None:
        self._board.tell(self._board.scheduler.new_step)
        self._step_began = self._cpu
        all_of(self._put(self._trainers, device_tasks.gpu, ()))  # drop the readings of the last step and of evaluation

    def end_step(self, context: StepContext, step: int) -> dict[str, float]:
        board = self._board
        self.run_on_other_trainers(context, device_tasks.release)
        for device in range(len(self._trainers), self._count):
            board.put(Task("train", device_tasks.release, (), device=device))
        board.tell(board.scheduler.cut)
        gpus = [share for share in all_of(self._put(self._trainers, device_tasks.gpu, ())) if share is not None]
        mine = {
            **self._replicas.busy(board.scheduler.numbers(), self.state.split),
            "wall": time.perf_counter() - board.scheduler.start,
            "cpu": self.cpu_seconds(context) - self._step_began,
            "gpu": sum(gpus),
            "gpus": len(gpus),
        }
        decides = self.settings.follows and bool(context.rewards.on_device)
        work = board.tell(board.scheduler.work_of, step)
        tried = what_if.of_step(board.measured(), self.state, work) if decides else []
        if decides:
            board.note(TRIED, tried)
        rows = as_rows(board.scheduler.events, step + 1, context.controller.rank, board.entries())
        found = context.controller.gather((mine, rows, tried))
        numbers = summed([mine for mine, _, _ in found])
        self._lines = [line for _, lines, _ in found for line in lines]
        split = self.state.split
        decided = [self._decide(step + 1, what_if.slowest([tried for _, _, tried in found]))] if decides else []
        if self.settings.lend:
            decided.append(lending.decision(step + 1, self._lines, len(self._trainers), board.scheduler))
        self._lines += in_one_line(decided)
        if self.settings.apart and self.settings.split != "fixed":
            board.apart(self.state.split, self.state.moves)
        wall = numbers["wall"]
        busy = numbers["rollout_busy"] + numbers["judge_busy"] + numbers["train_busy"]
        return {
            "placement/rollout_devices": split.rollout,
            "placement/judge_devices": split.judge,
            "placement/rollout_busy": numbers["rollout_busy"],
            "placement/judge_busy": numbers["judge_busy"],
            "placement/wake": numbers["wake"],
            "placement/moves": numbers["moves"],
            **({"placement/lent": numbers["lent"]} if self.settings.lend else {}),
            "placement/idle": max(0.0, 1 - busy / (self._count * len(found) * wall)),
            "placement/cpu": numbers["cpu"] / (self._count * len(found) * wall),
            **({"placement/gpu": numbers["gpu"] / numbers["gpus"]} if numbers["gpus"] else {}),
        }

    def lines(self) -> Sequence[JsonObject]:
        return self._lines

    def cpu_seconds(self, context: StepContext) -> float:
        for device in range(len(self._trainers), self._count):  # the last known value: they may be working
            (heard,) = self._put([device], device_tasks.cpu_seconds, ())
            heard.add_done_callback(lambda answer, device=device: self._record_cpu_seconds(device, answer))
        answers = all_of(self._put(self._trainers, device_tasks.cpu_seconds, ()))
        self._cpu_of[: len(answers)] = answers
        self._cpu = sum(self._cpu_of)
        return self._cpu

    def _record_cpu_seconds(self, device: int, answer: Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            self._cpu_of[device] = answer.result()

    def state_dict(self) -> PartState:
        return PartState(asdict(self.state) if self.settings.follows else {})

    def load_state_dict(self, numbers: JsonObject, saved: Saved) -> None:
        if self.settings.follows:
            self.state = self.state.read(numbers)
            self._board.note(RESUMES, numbers)
            if self.settings.apart:
                self._board.apart(self.state.split, self.state.moves)

    def close(self) -> None:
        self._board.close()
        for worker in self._workers:
            worker.close()
        for thread in self._threads:
            thread.join(1.0)  # idle ones end; one that frees tensors while the interpreter shuts down aborts it

    def _decide(self, step: int, tried: Sequence[float]) -> JsonObject:
        found = adaptive.next_placement(self.settings, self.state, tried, self._count)
        self.settings, self.state = found.settings, found.state
        if found.refused is not None:
            notices.tell(f"placement: {found.refused}")
        return as_line(step, found.decision)

    def _put(self, devices: Iterable[int], call: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Future[Any]]:
        return [self._board.put(Task("train", call, arguments, device=d)) for d in devices]

    def _device(self, context: StepContext, device: int) -> None:
        """The thread of one device. An error, inside a task or outside, is sent to everyone who waits for an answer."""
        try:
            self._work(context, device)
        except BaseException as error:
            self._board.fail(device, error)

    def _work(self, context: StepContext, device: int) -> None:
        if device == 0 and context.recipe.threads:
            torch.set_num_threads(context.recipe.threads)  # for this thread
        awake: set[str] = set()
        last: str | None = None
        version, trains = None, self.settings.apart and device in self._trainers
        while (task := self._board.take(device)) is not None:
            shown = task.role if task.call.__name__ in _SHOWN else None
            returns = task.call is lending.give_back and version is not None
            role = task.arguments[0] if task.call is device_tasks.ready else "train" if returns else shown
            began = turned = time.perf_counter()
            priced = moved = self.settings.apart and not trains and shown in LENT and last not in (None, shown)
            last = shown if shown in LENT else last
            if not task.answer.set_running_or_notify_cancel():
                self._board.done(device, None, began, turned, turned)
                continue
            try:
                needed = needs(context, role, task.judge) if role else set()
                if role == "judge" and not self.settings.one_judge:
                    needed |= {one for one in awake if one.startswith("judge")}
                if role and (needed != awake if self.settings.sleep else needed - awake):
                    with self._starting_up():
                        how = (role, self.settings.sleep, task.judge, self.settings.one_judge)
                        once = self._perform(context, device, Task(task.role, device_tasks.switch_role, how))
                    awake = needed if self.settings.sleep else needed | awake
                    priced = (self.settings.sleep or moved) and not once and role != "train"
                    turned = time.perf_counter() if self.settings.sleep or once else turned
                if task.version is not None and task.version is not version:
                    load = lending.borrow if trains else device_tasks.load_version
                    self._perform(context, device, Task(task.role, load, (task.version,)))
                    version, turned, priced = task.version, time.perf_counter(), priced or trains
                borrowed = trains and task.version is not None
                answer = self._perform(context, device, lending.for_lent(task) if borrowed else task)
                if returns:
                    version, turned, priced = None, time.perf_counter(), True
            except BaseException as error:
                self._board.done(device, shown, began, turned, time.perf_counter(), priced=priced, to=role)
                task.answer.set_exception(error)
            else:
                self._board.done(device, shown, began, turned, time.perf_counter(), priced=priced, to=role)
                task.answer.set_result(answer)
            del task

    def _perform(self, context: StepContext, device: int, task: Task) -> Any:
        if device == 0:
            return device_tasks.perform(context, task.call, task.arguments)
        return self._workers[device - 1].perform(context, task.call, task.arguments, task.features)


class Replicas:
    """Final class. ``leaders``: the devices that ask a server, and the number of its devices; empty: no server has
    several. ``devices``: of the controller."""

    def __init__(self, leaders: Mapping[int, int], devices: int) -> None:
        self._leaders = leaders
        self.members = [device for device in range(devices) if device not in leaders] if leaders else []
        self._awake = False

    def begin(self, put: Put, state: State) -> tuple[Split, Moves] | None:
        """Begin a generate phase: wait until all members have freed what they do not use. Returns its split and moves;
        no device changes its role, in an evaluation either. None without replicas."""
        if not self.members:
            return None
        all_of(put(self.members, device_tasks.free, ()))
        self._awake = True
        return state.split, "never"

    def rest(self, put: Put) -> None:
        """Before training: wait until the servers sleep, if they do (``placement.sleep``)."""
        if self._awake:
            all_of(put(self._leaders, device_tasks.ready, ("train",)))
        self._awake = False

    def busy(self, numbers: dict[str, float], split: Split) -> dict[str, float]:
        """Device-seconds of all devices of a server in place of those of its leader."""
        if not self._leaders:
            return numbers
        of = {"rollout_busy": self._leaders[0], "judge_busy": self._leaders.get(split.rollout, 1)}
        return {name: value * of.get(name, 1) for name, value in numbers.items()}


class OnDevices:
    """Final class: sends the calls of the reward ``label`` to the devices that judge."""

    def __init__(self, board: TaskQueue, label: str, of: For) -> None:
        self._board, self._label, self._for = board, label, of

    def submit(self, samples: Sequence[Sample], context: Context) -> Future[Answer]:
        asked = (self._label, list(samples), context.step)
        task = Task("judge", device_tasks.score, asked, of=self._for(context), judge=self._label)
        answer = self._board.put(task)
        answer.add_done_callback(lambda done: context.sent.update(_sent(done)))
        return answer

    def close(self) -> None:
        """The devices go on until their queue is closed."""


class Outside:
    """Final class: the calls of a reward that computes outside of the devices, for example a judge behind HTTP. Each is
    recorded, so that the placement and the simulator know how long the samples wait for it."""

    def __init__(self, board: TaskQueue, calls: Calls, of: For) -> None:
        self._board, self._calls, self._for = board, calls, of

    def submit(self, samples: Sequence[Sample], context: Context) -> Future[Answer]:
        answer = self._calls.submit(samples, context)
        answer.add_done_callback(lambda done: self._record(done, context))
        return answer

    def close(self) -> None:
        self._calls.close()

    def _record(self, done: Future[Answer], context: Context) -> None:
        if done.cancelled() or done.exception():
            return
        answer, asked = done.result(), done.result().asked
        if answer.ended - answer.began >= _SHORT_S:
            call = Call(context.label, asked.requests, asked.seconds, asked.at_once)
            self._board.called(call, answer.began, answer.ended, self._for(context))


def _sent(answer: Future[Answer]) -> Counter[str]:
    return Counter() if answer.cancelled() or answer.exception() else answer.result().sent
