"""Replay the log of a controller's scheduler: a new scheduler hears the same, and decides again.

An entry is ``[seconds, what, ...]``, with the seconds of the process's clock. What the scheduler heard has the name of
its method, and the method's arguments. ``BEGINS`` is the start of a process, ``RESUMES`` the policy's state from a
checkpoint, ``HANDED`` which devices got which tasks, ``MEASURED`` the moment whose measurements the policy used, and
``TRIED`` what this controller's last step would have taken under each candidate. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.config.placement import Placement
from mmrl.core.json_types import Json, JsonObject, as_integer, as_list, as_object, as_text
from mmrl.placement import adaptive, what_if
from mmrl.placement.adaptive import Split, State
from mmrl.placement.scheduler import Scheduler
from mmrl.placement.tasks import Call, Event, Role

Entry = Sequence[Json]
DECIDES = ("apart", "lend", "begin", "comes", "ready", "idle", "done")
"""What the scheduler decides after."""
BEGINS, RESUMES, HANDED = "begins", "resumes", "handed"
MEASURED, TRIED = "measured", "tried"


@dataclass(frozen=True, eq=False)
class LoggedTask:
    """``Schedulable``: a task of the log."""

    number: int
    role: Role
    device: int | None
    updates: int | None
    of: tuple[int, int] | None
    judge: str


class Replay:
    """Final class: the scheduler and the policy of one controller, which decide again. ``settings``: the run's.

    It ends at the first entry that differs from its own decision, since all later ones may follow from that.
    """

    def __init__(self, settings: Placement) -> None:
        self.settings = settings
        self.step = 0
        self.handed = 0
        """Tasks that the same devices got."""
        self.decided = 0
        """Decisions of the policy that are the same."""
        self.differs: str | None = None
        """The first difference."""
        self.tried: list[float] = []
        """What the last step would have taken on this controller."""
        self._now = 0.0
        self._scheduler: Scheduler[LoggedTask] | None = None
        self._measured: Scheduler[LoggedTask] | None = None
        self._state: State | None = None
        self._worked: list[Event] = []
        self._found: list[list[int]] = []
        """What the replay handed out after the last entry."""

    def hear(self, step: int, entries: Iterable[Entry]) -> None:
        """Hear the entries until the end of ``step``. Raises ``ValueError``, ``TypeError``, ``LookupError`` or
        ``AttributeError`` for an entry that is none."""
        self.step = step
        for entry in entries:
            if self.differs is not None:
                return
            match entry:
                case [int() | float() as moment, str(what), *given]:
                    self._now = moment
                    self._hear(what, given)
                case _:
                    raise ValueError(f"no entry of a scheduler's log: {entry!r}")
        if self._found:
            self._compare("devices got tasks", [], self._found)

    def _hear(self, what: str, given: list[Any]) -> None:
        if what == HANDED:
            self._compare("devices got tasks", given[0], self._found)
            self.handed += len(self._found) * (self.differs is None)
            self._found = []
            return
        if self._found:
            self._compare("devices got tasks", [], self._found)
        elif what == BEGINS:
            self._begin(as_object(given[0]))
        elif what == RESUMES:
            self._state = self._known.read(as_object(given[0]))
        elif what == MEASURED:
            self._measured = what_if.measured(self._heard)
        elif what == TRIED:
            tried = what_if.of_step(self._measured or self._heard, self._known, self._worked)
            self._compare("seconds under each candidate", given[0], tried)
            self.tried = tried
        else:
            self._tell(what, given)

    def _begin(self, devices: JsonObject) -> None:
        """A process of the controller starts."""
        match devices:
            case {"devices": int(count), "judges": [*judges], "placement": placement, "judged": bool(judged)}:
                self.settings = Placement.model_validate(placement)
                self._scheduler = Scheduler(count, lambda: self._now, self.settings)
                self._scheduler.judges.know(map(str, judges))
                self._state = adaptive.starting(self.settings, count, judged=judged)
            case _:
                raise ValueError(f"no start of a scheduler's log: {devices!r}")

    def decide(self, step: int, tried: Sequence[float], line: JsonObject) -> None:
        """Decide after ``step``, by ``tried`` of the slowest controller, and compare with the ``line`` of the run's
        own decision."""
        self.step = step
        found = adaptive.next_placement(self.settings, self._known, tried, len(self._heard.roles))
        self.settings, self._state = found.settings, found.state
        mine = [found.decision.split.rollout, found.decision.split.judge, found.decision.why]
        words = as_text(line["decision"])[: len(found.decision.why)]  # what was lent may stand behind it
        self._compare("next placement", [line["rollout"], line["judge"], words], mine)
        self.decided += self.differs is None

    def _tell(self, what: str, given: list[Any]) -> None:
        """Tell the scheduler what it heard, and ask it for its decisions where the run did."""
        scheduler = self._heard
        match what, given:
            case "apart", [rollout, judge, moves]:
                mine = [self._known.split.rollout, self._known.split.judge, self._known.moves]
                self._compare("roles of the devices", given, mine)
                scheduler.apart(Split(rollout, judge), moves)
            case "begin", [rollout, judge, moves, to_come, members]:
                scheduler.begin(Split(rollout, judge), moves, to_come, members)
            case "ready", [number, role, device, updates, of, judge]:
                scheduler.ready(LoggedTask(number, role, device, updates, _pair(of), judge))
            case "done", [device, role, began, turned, ended, priced, to]:
                scheduler.done(device, role, began, turned, ended, priced=priced, to=to)
            case "called", [call, began, ended, of]:
                scheduler.called(Call(*call), began, ended, _pair(of))
            case "work_of", [step]:
                self._worked = scheduler.work_of(step)
            case "lend" | "idle" | "comes" | "drop" | "new_step" | "recall" | "cut" | "withdraw", _:
                getattr(scheduler, what)(*given)
            case _:
                raise ValueError(f"no entry of a scheduler's log: {what} {given!r}")
        if what in DECIDES:
            self._found = [[device, task.number] for device, task in scheduler.handed()]

    def _compare(self, what: str, recorded: Json, mine: Json) -> None:
        if recorded != mine:
            self.differs = f"{what}: recorded {recorded}, replayed {mine}"

    @property
    def _heard(self) -> Scheduler[LoggedTask]:
        if self._scheduler is None:
            raise ValueError(f"the log of a scheduler has no {BEGINS!r} before its other entries")
        return self._scheduler

    @property
    def _known(self) -> State:
        if self._state is None:
            raise ValueError(f"the log of a scheduler has no {BEGINS!r} before its other entries")
        return self._state


def _pair(of: Json) -> tuple[int, int] | None:
    return None if of is None else tuple(as_list(of))  # type: ignore[return-value]


def replay(lines: Iterable[JsonObject], settings: Placement) -> dict[int, Replay]:
    """The replay of each controller, by its rank. ``lines``: of placement.jsonl, in their order; ``settings``: the
    run's. It ends after the line in which one differs: the others decide by its seconds too. Raises as
    ``Replay.hear``."""
    found: dict[int, Replay] = {}
    for line in lines:
        if any(mine.differs is not None for mine in found.values()):
            break
        if "heard" in line:
            mine = found.setdefault(as_integer(line["controller"]), Replay(settings))
            mine.hear(as_integer(line["step"]), [as_list(entry) for entry in as_list(line["heard"])])
        elif "decision" in line and settings.follows:
            tried = what_if.slowest([mine.tried for mine in found.values()])
            for mine in found.values():
                mine.decide(as_integer(line["step"]), tried, line)
    return found
