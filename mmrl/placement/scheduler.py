"""The scheduler of a controller's devices: which device does which task, and which idle device changes its role.

A state machine without threads and without a clock of its own. It hears of events (a phase begins, a task is ready, a
device is idle, a task is finished) and hands tasks to idle devices. In a run ``TaskQueue`` drives it from the devices'
threads; in the simulator ``SimulatedDevices`` drives it with simulated time. Its decisions depend only on the order and
the times of the events. Imports no torch.

A device works in one role at a time. It keeps its role while there is work in it; without work it may switch to the
other role, if the placement allows it. Devices that only train may be lent: while they wait for the samples of a step,
they do the work of the other roles for it. Where the others sample ahead and may switch too, the step that trains next
goes first: a device without work for it in its role looks at the other role, before it works for a later step.

A recipe may have several judges: the devices that judge are divided among them by their work. A device keeps its judge
while samples wait for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from mmrl.config.placement import Placement
from mmrl.placement.adaptive import Moves, Split, worth_lending, worth_moving
from mmrl.placement.tasks import (
    LENT,
    Call,
    Event,
    Role,
    Schedulable,
    StepEvents,
    is_for,
    needs_newer_weights,
    recent,
    trains,
    trains_later,
)

T = TypeVar("T", bound=Schedulable)


class Scheduler(Generic[T]):
    """Final class. ``clock``: the current time in seconds, real or simulated. ``settings``: the recipe's section
    ``placement``, of which the scheduler keeps what does not change in a run."""

    def __init__(self, devices: int, clock: Callable[[], float], settings: Placement) -> None:
        self.settings = settings
        self.roles: list[Role] = ["rollout"] * devices
        self.events = StepEvents()
        self.moves = 0
        self.lent = 0
        """Tasks of the other roles that devices which train got in this step."""
        self.prices: dict[Role, float] = {}
        """Seconds that recent switches to a role took."""
        self.start = clock()
        self.since = [0.0] * devices
        """When each device got its task, or the end of the last step if that was later."""
        self.taken: list[T | None] = [None] * devices
        """The latest task of each device."""
        self._clock = clock
        self._tasks: Waiting[T] = Waiting(devices)
        self._running: list[Role | None] = [None] * devices
        self._awake: list[Role] = ["rollout"] * devices
        self.waiting: set[int] = set()
        """The idle devices."""
        self._seconds: dict[Role, float] = {}
        self.judges = Judges(devices, alone=settings.one_judge)
        self._to_come, self._round = 0, -1
        self._moves: Moves = "after"
        self.ahead = False
        """Whether some devices train while the others work for later steps."""
        self._changed = [False] * devices
        """Whether a device switched its role for its task."""
        self._worked: dict[int, list[Event]] = {}
        """What was done for each step that is not trained yet, in seconds of the clock."""
        self._lent_to: int | None = None
        self._lent_awake: list[set[Role]] = [set() for _ in range(devices)]
        """The roles that a device which trains can take again without a switch: it keeps a judge, and the weights to
        sample with until it is back."""

    # -- events --------------------------------------------------------------------------------------------------------

    def new_step(self) -> None:
        """Discard the events of the last step; times are measured from now on."""
        self.events, self.moves, self.lent, self.start = StepEvents(), 0, 0, self._clock()
        self._round = -1

    def apart(self, split: Split, moves: Moves = "never") -> None:
        """Have the first devices train, and of the others ``split.judge`` judge: those that have a judge, then
        the last ones. ``moves``: never, or where that is worth it; without judges the roles then stay as they are."""
        n, trainers = len(self.roles), len(self.roles) - split.rollout - split.judge
        if not (self.ahead and moves == "worth" and not split.judge):
            order = sorted(range(trainers, n), key=lambda device: (self._awake[device] == "judge", device))
            judging = set(order[len(order) - split.judge :])
            self.roles = ["train" if d < trainers else "judge" if d in judging else "rollout" for d in range(n)]
            self.judges.divide(sorted(judging))
        self._moves, self.ahead = moves, True

    def work_of(self, step: int) -> list[Event]:
        """What was done for ``step``, which is trained; it is discarded, and what was done for earlier ones."""
        found = self._worked.get(step, [])
        self._worked = {later: events for later, events in self._worked.items() if later > step}
        return found

    def lend(self, step: int) -> None:
        """Let an idle device that trains do what ``step`` waits for, if that saves time."""
        self._lent_to = step

    def recall(self) -> None:
        """Devices that train get no more tasks of other roles. One at work ends its task; then it is back."""
        self._lent_to = None
        for awake in self._lent_awake:
            awake.discard("rollout")

    def begin(self, split: Split, moves: Moves, to_come: int, members: Collection[int] = ()) -> None:
        """Start a generate phase of ``to_come`` micro-batches: the first devices sample, the last ones judge; the
        ``members`` of a server that another device asks get no task of the phase."""
        roles: list[Role] = ["judge" if d >= split.rollout else "rollout" for d in range(len(self.roles))]
        self.roles = ["train" if d in members else role for d, role in enumerate(roles)]
        self.judges.divide(self._judging)
        self._moves, self._to_come = moves, to_come
        self._round += 1

    def ready(self, task: T) -> None:
        """A task can be done now."""
        self._tasks.by_step = self._moves_ahead
        self._tasks.add(task)
        if task.role == "rollout" and not self.ahead:
            self._to_come -= 1

    def comes(self, count: int) -> None:
        """Say how many micro-batches of this phase are still to come."""
        self._to_come = count

    def idle(self, device: int) -> None:
        """The device asks for its next task."""
        self.waiting.add(device)

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
        """A task is finished: the device switched to ``role`` between ``began`` and ``turned``, and then worked in it;
        None for bookkeeping, for which it switched ``to`` a role. ``priced``: a switch within a phase would take as
        long."""
        self._running[device] = None
        if priced and (turned_to := role or to) is not None and (turned > began or self._changed[device]):
            self.prices[turned_to] = recent(self.prices.get(turned_to, 0.0), turned - began)
        if turned > began:
            self.events.append(Event(device, "wake", self._after(began), self._after(turned), priced=priced))
        if role is not None:
            since, (of, number, judge) = max(turned, self.since[device]), self._for(device)  # the cut part is counted
            until = max(ended, since)
            self.events.append(Event(device, role, self._after(since), self._after(until), number, of, judge=judge))
            self._seconds[role] = recent(self._seconds.get(role, 0.0), ended - turned)
            self.judges.took(judge, ended - turned)
            if of is not None and role != "train":
                self._worked.setdefault(of, []).append(Event(device, role, turned, ended, number, of, judge=judge))

    def called(self, call: Call, began: float, ended: float, of: tuple[int, int] | None) -> None:
        """A reward has computed outside of the devices. ``of``: as that of a task."""
        step, number = of or (None, self._round)
        self.events.append(Event(-1, "call", self._after(began), self._after(ended), number, step, call=call))
        if step is not None:
            self._worked.setdefault(step, []).append(Event(-1, "call", began, ended, number, step, call=call))

    def cut(self) -> None:
        """Count the unfinished work of samplers and judges so far for this step, which ends while they work."""
        now = self._clock()
        for device, role in enumerate(self._running):
            if role in ("rollout", "judge"):
                began, (of, number, judge) = self._after(self.since[device]), self._for(device)
                self.events.append(Event(device, role, began, self._after(now), number, of, cut=True, judge=judge))
                self.since[device] = now

    def drop(self, role: Role) -> None:
        """Discard the waiting tasks of a role."""
        self._tasks.drop(role)

    def withdraw(self) -> list[T]:
        """Discard all waiting tasks, and return them."""
        return self._tasks.withdraw()

    # -- decisions -----------------------------------------------------------------------------------------------------

    def handed(self) -> list[tuple[int, T]]:
        """Give tasks to idle devices: first those of their role, then those for which they change it."""
        found: list[tuple[int, T]] = []
        if not self.waiting or not self._tasks:
            return found
        for device in sorted(self.waiting, key=self._first) if len(self.waiting) > 1 else tuple(self.waiting):
            if self._tasks.own[device]:
                self._hand(found, device, self._tasks.own[device].popleft())
            elif self._moves_ahead:
                continue
            elif (task := self._pop(self.roles[device], device)) is not None:
                self._hand(found, device, task)
        if self._moves_ahead:
            self._by_step(found)
        elif self._tasks.any() and (self._moves != "never" or self._alone()):
            if self._moves == "after" and self._sampling():
                return found
            for device in sorted(self.waiting, reverse=True):
                task = self.next_task(device)
                if task is not None:
                    self._hand(found, device, task)
        if self._lent_to is not None:
            self._lend(found, self._lent_to)
        return found

    def next_task(self, device: int) -> T | None:
        """The device's next task of a role, for which it may change its own."""
        role = self.roles[device]
        if role == "train":
            return None
        return self._pop(role, device) if self._tasks[role] else self._turned(device)

    def _turned(self, device: int, step: int | None = None) -> T | None:
        """A task of the other role that ``step`` (None: any) waits for, if the device then changes its own."""
        role = self.roles[device]
        other: Role = "judge" if role == "rollout" else "rollout"
        if not self._tasks.first_for(other, step) or not self._may_turn(role, other, step):
            return None
        task, self.roles[device] = self._pop(other, device), other
        self.moves += 1
        return task

    def _pop(self, role: Role, device: int) -> T | None:
        """The device's next task of a role, out of the queue."""
        if role == "train" or not (tasks := self._tasks[role]):
            return None
        place = self.judges.choose(tasks, device, self._judging, self.price("judge")) if role == "judge" else 0
        return None if place is None else self._tasks.take(role, place)

    @property
    def _judging_each(self) -> float:
        """Device-seconds of judging a micro-batch."""
        return self.judges.each if self.judges.several else self._seconds.get("judge", 0.0)

    @property
    def _judging(self) -> list[int]:
        return [device for device, role in enumerate(self.roles) if role == "judge"]

    def _by_step(self, found: list[tuple[int, T]]) -> None:
        """Give tasks of the earliest step, then the others: to devices of their role, then to those that change it."""
        free = sorted((d for d in self.waiting if self.roles[d] != "train"), key=self._first)
        for step in (*self._tasks.steps()[:1], None) if free else ():
            for device in free:
                if (
                    self._tasks.first_for(role := self.roles[device], step)
                    and (task := self._pop(role, device)) is not None
                ):
                    self._hand(found, device, task)
            free = sorted(self.waiting.intersection(free), reverse=True)
            for device in free:
                if (task := self._turned(device, step)) is not None:
                    self._hand(found, device, task)
            free = sorted(self.waiting.intersection(free), key=self._first)

    @property
    def _moves_ahead(self) -> bool:
        """Whether devices that sample ahead change their roles: all tasks are then in the order of their steps."""
        return self.ahead and self._moves == "worth"

    def _left(self, role: Role, step: int | None) -> float:
        """Device-seconds of what ``Waiting.wanted`` counts."""
        if role == "judge" and self.judges.several:
            return self.judges.left(task for task in self._tasks[role] if step is None or is_for(task, step))
        return self._tasks.wanted(role, step) * self._seconds.get(role, 0.0)

    def _lend(self, found: list[tuple[int, T]], step: int) -> None:
        """Give idle devices that train the tasks of sampling, else of judging, that ``step`` waits for.

        Only the step that trains next counts: a task of a later step could still be running when that one is ready.
        """
        idle = [device for device in self.waiting if self.roles[device] == "train"]
        if not idle or not self._tasks.any():
            return
        wanted: dict[Role, int] = {role: self._tasks.wanted(role, step) for role in LENT}
        for role in LENT if any(wanted.values()) else ():
            idle.sort(key=lambda device: (role not in self._lent_awake[device], device))
            while wanted[role] and idle and self._worth_lending(idle[0], role, step, wanted):
                device, fits = idle.pop(0), (t for t in self._tasks[role] if is_for(t, step))
                task = self.judges.preferred(fits, device) if role == "judge" else next(fits)
                self._tasks[role].remove(task)
                wanted[role] -= 1
                self.lent += 1
                self.moves += role not in self._lent_awake[device]
                self._lent_awake[device].add(role)
                self._hand(found, device, task)

    def _worth_lending(self, device: int, role: Role, step: int, wanted: Mapping[Role, int]) -> bool:
        """Whether a device that trains takes a task of a role. ``wanted``: what ``step`` waits for, by role."""
        sampling = [t for t, running in zip(self.taken, self._running, strict=True) if t and running == "rollout"]
        sampled = wanted["rollout"] + sum(is_for(task, step) for task in sampling)  # these are judged too
        seconds = {
            "rollout": wanted["rollout"] * self._seconds.get("rollout", 0.0),
            "judge": self._left("judge", step) + sampled * self._judging_each,
        }
        lent = [running for own, running in zip(self.roles, self._running, strict=True) if own == "train"]
        there = {name: self.roles.count(name) + lent.count(name) for name in LENT}
        other: Role = "judge" if role == "rollout" else "rollout"
        awake = role in self._lent_awake[device]
        price, back = (0.0, 0.0) if awake else (self.price(role), self.price("train") * (role == "rollout"))
        until, task = seconds[other] / max(there[other], 1), self._seconds.get(role, 0.0)
        return worth_lending(seconds[role], there[role], task, price, back, until)

    def _first(self, device: int) -> tuple[bool, int]:
        """The order of idle devices: those first that need not wake for their role."""
        return self._awake[device] != self.roles[device], device

    def _hand(self, found: list[tuple[int, T]], device: int, task: T) -> None:
        self.waiting.discard(device)
        self._running[device], self.since[device], self.taken[device] = task.role, self._clock(), task
        moves = task.role != "train" and self.roles[device] != "train"
        self._changed[device] = self.ahead and moves and self._awake[device] != task.role
        if task.role != "train":
            self._awake[device] = task.role
        if task.role == "judge":
            self.judges.of[device] = task.judge
        found.append((device, task))

    def _sampling(self) -> bool:
        return bool(self._to_come or self._tasks["rollout"] or "rollout" in self._running)

    def _alone(self) -> bool:
        """Whether tasks wait for a role that no device has."""
        return any(self._tasks[role] and role not in self.roles for role in LENT)

    def _may_turn(self, role: Role, other: Role, step: int | None = None) -> bool:
        """Whether a device without work in its role switches to the other role, which has work; ``step``: the work that
        it waits for."""
        sampling = self._sampling()
        if self._moves == "after":
            return not sampling
        there = sum(r == other for r in self.roles)
        if not there and not (role == "rollout" and self._to_come):
            return True
        if self._moves == "never":
            return False
        left = self._left(other, step)
        if other == "rollout":
            left += self._to_come * self._seconds.get(other, 0.0)
        own = 0.0
        if role == "judge" and sampling:
            own = (self._to_come + self._tasks.wanted("rollout", step)) * self._judging_each
        here = sum(r == role for r in self.roles) - 1
        return worth_moving(own, left, there, self.price(other), here, back=self.price(role))

    def expect(self, other: Scheduler[Any]) -> None:
        """Expect what ``other`` has measured: the mean seconds of a task, and the prices."""
        self._seconds, self.prices = dict(other._seconds), dict(other.prices)
        self.judges.expect(other.judges)

    def open_work(self) -> tuple[float, float]:
        """Device-seconds of work on the micro-batches that wait or are in work, and of one micro-batch. What is in work
        is half done."""
        sampling, judging = self._seconds.get("rollout", 0.0), self._judging_each
        running = self._running.count("rollout"), self._running.count("judge")
        left = len(self._tasks["rollout"]) * (sampling + judging) + self._left("judge", None)
        half = (running[0] * sampling + running[1] * self._seconds.get("judge", 0.0)) / 2
        return left + half + running[0] * judging, sampling + judging

    @property
    def at_work(self) -> bool:
        """Whether samples are drawn or judged, or wait for it."""
        return self._tasks.any() or any(role in LENT for role in self._running)

    def price(self, role: Role) -> float:
        """Seconds of a switch to a role: as measured, else as the other way, else 0."""
        return self.prices.get(role, max(self.prices.values(), default=0.0))

    # -- measurements --------------------------------------------------------------------------------------------------

    def numbers(self) -> dict[str, float]:
        """What this controller's devices did in the step, in the form that ``summed`` takes."""
        events = self.events
        return {
            "rollout_busy": events.seconds("rollout"),
            "judge_busy": events.seconds("judge"),
            "train_busy": events.seconds("train"),
            "scored": events.done_after("rollout", "judge", "call"),
            "price": self.price("judge"),
            "price_back": self.price("rollout"),
            "moves": self.moves,
            "lent": self.lent,
            "micro_batches": sum(event.role == "rollout" for event in events),
            "wake": events.seconds("wake"),
        }

    def _for(self, device: int) -> tuple[int | None, int, str]:
        """The step (None for the current one), the round and the judge of a device's current task."""
        task = self.taken[device]
        step, number = (None if task is None else task.of) or (None, self._round)
        return step, number, task.judge if task is not None and self.judges.several else ""

    def _after(self, moment: float) -> float:
        """Seconds after the start of the step; 0 for an earlier moment."""
        return max(0.0, moment - self.start)


class Judges:
    """Final class. ``of``: each device's judge, empty before it had one. With one judge it has nothing to do.
    ``alone``: a device has one judge awake at a time."""

    def __init__(self, devices: int, *, alone: bool) -> None:
        self.of = [""] * devices
        self.alone = alone
        self._seconds: dict[str, float] = {}
        """The recent mean of a micro-batch, by judge."""

    @property
    def names(self) -> list[str]:
        return list(self._seconds)

    @property
    def several(self) -> bool:
        return len(self._seconds) > 1

    def know(self, names: Iterable[str]) -> None:
        """These judges will be asked."""
        self._seconds |= {name: 0.0 for name in names if name not in self._seconds}

    def took(self, judge: str, seconds: float) -> None:
        """A micro-batch took so long. ``judge``: empty for another task."""
        if judge:
            self._seconds[judge] = recent(self._seconds.get(judge, 0.0), seconds)

    def expect(self, other: Judges) -> None:
        """Expect what ``other`` has measured."""
        self._seconds = dict(other._seconds)

    @property
    def each(self) -> float:
        """Device-seconds of judging a micro-batch, by all judges."""
        return sum(self._seconds.values())

    def left(self, tasks: Iterable[Schedulable]) -> float:
        """Device-seconds of tasks of judging."""
        counts = Counter(task.judge for task in tasks)
        return sum(count * self._seconds.get(judge, 0.0) for judge, count in counts.items())

    def divide(self, devices: Sequence[int]) -> None:
        """Give each of ``devices`` a judge, by the work of each; as many as possible keep theirs."""
        if not self.several:
            return
        counts = shares(self._seconds, len(devices))
        free = []
        for device in devices:
            if counts.get(self.of[device], 0):
                counts[self.of[device]] -= 1
            else:
                free.append(device)
        names = [name for name, count in counts.items() for _ in range(count)]
        for device, name in zip(free, names, strict=True):
            self.of[device] = name

    def choose(self, tasks: Sequence[T], device: int, judging: Collection[int], price: float) -> int | None:
        """The place of the task that an idle device takes, of the step that trains first; None: it waits.

        The first for its own judge; without one, that for the judge with the most work per device, if that is worth
        its ``price`` in seconds. ``judging``: all devices that judge now.
        """
        if not self.several:
            return 0
        first = trains(tasks[0])
        places: dict[str, int] = {}
        waits: Counter[str] = Counter()
        for n, task in enumerate(tasks):
            if trains(task) != first:
                break
            places.setdefault(task.judge, n)
            waits[task.judge] += 1
        own = self.of[device]
        if own in places:
            return places[own]
        there = Counter(self.of[other] for other in judging if other != device)
        left = {judge: count * (self._seconds.get(judge) or 1.0) for judge, count in waits.items()}
        judge = max(left, key=lambda name: left[name] / (there[name] + 1))
        fresh = device not in judging or not own
        if fresh or not there[judge] or worth_moving(0.0, left[judge], there[judge], price):
            return places[judge]
        return None

    def at_first(self, device: int, judging: int) -> str:
        """The judge that a device wakes at the start of a phase in which ``judging`` devices judge; empty: all."""
        return self.of[device] if self.several and (self.alone or judging >= len(self._seconds)) else ""

    def preferred(self, tasks: Iterator[T], device: int) -> T:
        """The first of ``tasks``, there is one, or the first for the judge that the device has."""
        first = next(tasks)
        if not self.several or first.judge == self.of[device]:
            return first
        return next((task for task in tasks if task.judge == self.of[device]), first)


def shares(work: dict[str, float], devices: int) -> dict[str, int]:
    """``devices`` divided by ``work``: each has one at least where there are enough, then the one that has the most
    work for each of its devices gets another."""
    ordered = sorted(work, key=lambda name: -work[name])
    counts = dict.fromkeys(ordered, 0)
    for _ in range(devices):
        most = max(ordered, key=lambda name: (not counts[name], (work[name] or 1e-9) / max(counts[name], 1)))
        counts[most] += 1
    return counts


class Waiting(Generic[T]):
    """Final class: the tasks of sampling and of judging for any device, by role, and those of one device: of training,
    and of sampling where devices share a sample.
    ``by_step``: whether tasks of a role are in the order in which their steps are trained."""

    def __init__(self, devices: int) -> None:
        self.by_step = False
        self.own: list[deque[T]] = [deque() for _ in range(devices)]
        self._of: dict[Role, deque[T]] = {role: deque() for role in LENT}

    def __getitem__(self, role: Role) -> deque[T]:
        return self._of[role]

    def __bool__(self) -> bool:
        return any(self.own) or self.any()

    def any(self) -> bool:
        """Whether something waits to be sampled or judged."""
        return any(self._of.values())

    def add(self, task: T) -> None:
        """Raises ``ValueError`` for a task of training without a device."""
        if task.role == "train" and task.device is None:
            raise ValueError("a task of training has a device of its own")
        if task.device is not None:
            self.own[task.device].append(task)
            return
        tasks, later = self._of[task.role], trains_later if self.by_step else needs_newer_weights
        if tasks and later(tasks[-1], task):
            tasks.insert(next(n for n, other in enumerate(tasks) if later(other, task)), task)
        else:
            tasks.append(task)

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
        self.own = [deque(task for task in tasks if task.role != role) for tasks in self.own]
        if role != "train":
            self._of[role].clear()

    def withdraw(self) -> list[T]:
        """Discard all tasks, and return them."""
        left = [task for tasks in (*self._of.values(), *self.own) for task in tasks]
        for role in (*LENT, "train"):
            self.drop(role)
        return left
