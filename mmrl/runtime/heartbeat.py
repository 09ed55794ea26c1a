"""Heartbeats of a run's processes: each gives signs of life in the rendezvous store, and looks for those of others.

Process 0 watches all, and all watch process 0. The first process of every host also watches those of its host: it sees
within seconds that one has ended or is stopped.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import psutil

from mmrl.config.replicas import leaders
from mmrl.config.schema import Recipe
from mmrl.controller.peers import begun
from mmrl.core.durations import duration
from mmrl.core.json_types import Json, JsonObject, as_integer, as_list, as_object
from mmrl.inference.server_devices import ServerDevices
from mmrl.runtime import process_probe
from mmrl.runtime.process_probe import Silence
from mmrl.runtime.program import PATIENCE
from mmrl.runtime.rendezvous import GoneError, RendezvousStore
from mmrl.runtime.stall_watchdog import Sign, StallWatchdog, Stuck, no_progress

_EVERY = 0.5
_LEAVE = 5.0
"""Seconds in which the process may end by itself after another was lost: its collectives then fail, or hang."""
_SAID = 100
"""The newest lines that a sign of life carries."""


def whereabouts() -> JsonObject:
    """This process, so that another of the same host can read its state; ``visible``: the GPUs that it sees."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    since, visible = psutil.Process().create_time(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"host": platform.node(), "space": space, "pid": os.getpid(), "since": since, "visible": visible}


@dataclass(frozen=True)
class Processes:
    """The processes of a run. ``where``: ``whereabouts`` by number. Each controller has ``devices`` consecutive ones;
    its workers run in those of the devices ``workers``, and the other processes only keep a device for the server of
    the worker before them."""

    where: Mapping[int, JsonObject]
    devices: int
    workers: Sequence[int]

    @property
    def controllers(self) -> int:
        return (max(self.where) + 1 + self.devices - 1) // self.devices

    def short_name(self, number: int) -> str:
        rank, device = divmod(number, self.devices)
        return f"{f'device {device} of ' if device else ''}controller {rank} of {self.controllers}"

    def name(self, number: int) -> str:
        its = self.where[number]
        return f"{self.short_name(number)} (process {its['pid']} on {its['host']})"

    def log(self, number: int) -> str:
        """The name of its log in ``controllers/`` of the run."""
        rank, device = divmod(number, self.devices)
        return f"{rank}.{device}.log" if device else f"{rank}.log"

    def others_of(self, number: int) -> list[int]:
        """The processes of the other devices of a controller, if ``number`` is that of its first."""
        return [] if number % self.devices else [n for n in self.where if 0 < n - number < self.devices]

    def hosts(self, training: int) -> dict[int, str]:
        """The hosts of the ranks of the process group: the first ``training`` workers of every controller."""
        ranks = [(rank, worker) for rank in range(self.controllers) for worker in range(training)]
        numbers = [rank * self.devices + self.workers[worker] for rank, worker in ranks]
        return {place: str(self.where[number]["host"]) for place, number in enumerate(numbers)}

    def servers(self, recipe: Recipe, number: int) -> ServerDevices | None:
        """The devices of the servers that process ``number`` starts; None where those are its own."""
        rank, device = divmod(number, self.devices)
        led, ends = leaders(recipe), [*self.workers[1:], self.devices]
        widths = led or {first: end - first for first, end in zip(self.workers, ends, strict=True)}
        if max(widths.values()) == 1:
            return None
        visible = [str(self.where[rank * self.devices + d]["visible"]) for d in range(self.devices)]
        sampling = self.devices - recipe.placement.judging(self.devices) if led else self.devices
        together = ",".join(filter(None, visible[device : device + widths.get(device, 0)]))
        return ServerDevices(together, device in widths and device < sampling)


class HeartbeatMonitor:
    """Final class: a thread that gives a sign of life of process ``number``, and looks for those of others, until
    ``close``.

    ``leave``: ends this process if it does not end by itself after another was lost; it gets the reason. ``show``:
    prints what a user shall see: the lines of the others, and who gives no sign of life. Process 1 says so of process
    0. ``called``: says in which call a process was, by its number.
    """

    def __init__(
        self,
        store: RendezvousStore,
        number: int,
        processes: Processes,
        patience: float,
        pulse: StallWatchdog,
        leave: Callable[[str], None],
        show: Callable[[str], None] = print,
        called: Callable[[int], str] = lambda number: "",
    ) -> None:
        self._store, self._number, self._processes = store, number, processes
        where = processes.where
        here = [n for n in where if _same_host(where[n], where[number])]
        watched = where if number == 0 else here if number == min(here) else ()
        self._watched = [n for n in where if n != number and (n == 0 or n in watched)]
        self._patience, self._pulse = patience, pulse
        self._leave, self._show, self._called = leave, show, called
        self._seen: dict[int, tuple[Json, float]] = {}
        self._silences: dict[int, Silence] = {}
        self._signs: dict[int, Sign] = {}
        self._printed = dict.fromkeys(where, 0)
        self._lines: deque[str] = deque(maxlen=_SAID)
        self._said = 0
        self._broken = False
        self._end: JsonObject | None = None
        self._ended: set[int] = set()
        self._closing = threading.Event()
        self.lost = ""
        """Who was lost, and how; empty as long as nobody is."""
        self.failed: JsonObject | None = None
        """The last note of a process that has ended with an error; ``lost`` is then that error."""
        self._asked = 0.0
        """When the store was asked something that it has not answered; 0 if it has."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._second = threading.Thread(target=self._see_store, name="heartbeat-store", daemon=True)

    def watch(self) -> None:
        """Start, once all have given a first sign of life."""
        self._thread.start()
        self._second.start()

    def close(self, end: JsonObject | None = None) -> None:
        """Stop; ``end`` tells the others how this process ended: with ``error``, or with an empty one."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_LEAVE)
        self._end = end
        if end is not None and not self.lost:
            with suppress(GoneError):
                self.beat(-1)

    def all_ended(self) -> bool:
        """Wait until all watched processes have ended; False if one was lost, or ended with an error."""
        with self._pulse.waiting():
            while not self.lost and len(self._ended) < len(self._watched) and self._thread.is_alive():
                time.sleep(_EVERY / 5)
        return not self.lost

    def tell(self, line: str) -> None:
        """Send a line of this process to the terminal."""
        if self._number:
            self._lines.append(line)
            self._said += 1

    def broken(self, seconds: float) -> str:
        """After a connection between the processes broke: who was lost, as soon as it is known; empty if nobody is."""
        self._broken = True
        until = time.monotonic() + seconds
        while not self.lost and time.monotonic() < until and self._thread.is_alive():
            time.sleep(_EVERY / 5)
        return self.lost

    def _run(self) -> None:
        number = 0
        while not self._closing.wait(_EVERY):
            number += 1
            try:
                self._asked = time.monotonic()
                self.beat(number)
                self.lost = self._look()
            except GoneError:
                called, first = self._called(0), self._processes.name(0)
                self.lost = (
                    f"{first} has died{called}"
                    if called
                    else f"{first} has ended, or the launcher on its host: where all meet nobody answers"
                )
            self._asked = 0.0
            if self.lost:
                with suppress(GoneError):
                    self._store.write("lost", self.lost)
                if not self._closing.wait(_LEAVE):
                    self._leave(self.lost)
                return

    def _see_store(self) -> None:
        """Watch the other thread: the store does not answer as long as the process that keeps it is stopped."""
        while not self._closing.wait(_EVERY) and not self.lost:
            asked = self._asked
            seconds = time.monotonic() - asked if asked else 0.0
            if seconds > 4 * _EVERY and (why := self._silent(0, seconds) if self._number else ""):
                self.lost = why
                if not self._closing.wait(_LEAVE):
                    self._leave(why)

    def beat(self, number: int) -> None:
        """Give a sign of life: the first is 0, the last -1."""
        self._signs[self._number] = sign = Sign() if self._end else self._pulse.sign(begun())
        note: dict[str, Json] = {"n": number, "broken": self._broken, "end": self._end}
        note |= {"said": self._said, "lines": list(self._lines), "sign": asdict(sign)}
        self._store.write(f"beat/{self._number}", note)

    def _look(self) -> str:
        """Who is lost, and how."""
        if self._store.has("lost"):
            return str(self._store.read("lost"))
        watched = [number for number in self._watched if number not in self._ended]
        notes = self._store.read_all([f"beat/{number}" for number in watched])
        for number, note in zip(watched, map(as_object, notes), strict=True):
            before = self._seen.get(number)
            if before is None or before[0] != note["n"]:
                self._seen[number] = note["n"], time.monotonic()
                self._silences.pop(number, None)
                self._signs[number] = _sign(as_object(note["sign"]))
                self._broken = self._broken or bool(note["broken"])
                self._print(number, note)
                if note["end"]:
                    self._ended.add(number)
                    end = as_object(note["end"])
                    if end["error"] and 0 in (number, self._number):
                        self.failed = end
                        return str(end["error"])
            elif why := self._silent(number, time.monotonic() - before[1]):
                return why
        if self._number:
            return ""
        return no_progress(self._signs, self._processes.name, self._processes.others_of)

    def _print(self, number: int, note: JsonObject) -> None:
        """Show the lines that are new."""
        lines, said = as_list(note["lines"]), as_integer(note["said"])
        new = min(said - self._printed[number], len(lines))
        self._printed[number] = said
        for line in lines[len(lines) - new :] if self._number == 0 else ():
            self._show(f"{self._processes.short_name(number)}: {line}")

    def _silent(self, number: int, seconds: float) -> str:
        """Why a process that has given no sign of life for ``seconds`` counts as lost; empty if it does not yet."""
        silence = self._silences.setdefault(number, Silence())
        where, name = self._processes.where, self._processes.name(number)
        if _same_host(where[number], where[self._number]):
            if seconds > 2 * _EVERY and _has_ended(where[number]):
                return f"{name} has died{self._called(number)}"
            silence.see(process_probe.read(as_integer(where[number]["pid"])))
        frozen = f"{name} has given no sign of life for {seconds:.0f} s"
        if seconds > min(PATIENCE, self._patience) and (silence.stopped or self._broken):
            return f"{frozen}; {silence if silence.stopped else 'its connections are closed'}"
        if seconds > self._patience:
            return (
                f"{frozen}; {silence}. If a reward or a data set of yours holds Python's lock (GIL) for so long, raise "
                "runtime.patience"
            )
        tells = self._number == (1 if number == 0 else 0)
        if seconds > PATIENCE and tells and not silence.reported:
            silence.reported = True
            self._show(f"{frozen}; {silence}. The run waits at most {duration(self._patience)} (runtime.patience)")
        return ""


def _sign(note: JsonObject) -> Sign:
    return Sign(**{**note, "stuck": Stuck(**as_object(note["stuck"])) if note["stuck"] else None})  # pyright: ignore[reportArgumentType]


def _same_host(a: JsonObject, b: JsonObject) -> bool:
    """Whether two processes are of one host, so that one can read the state of the other."""
    return (a["host"], a["space"]) == (b["host"], b["space"])


def _has_ended(its: JsonObject) -> bool:
    """Whether the process, of this host, has ended."""
    try:
        process = psutil.Process(as_integer(its["pid"]))
        return process.status() == psutil.STATUS_ZOMBIE or process.create_time() != its["since"]
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
