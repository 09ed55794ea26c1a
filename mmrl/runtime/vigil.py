"""Processes of a launched job watch each other: process 0 watches all, and all watch process 0."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

import psutil

from mmrl.controller.peers import begun
from mmrl.core.json_types import Json, JsonObject, as_object
from mmrl.runtime import process_probe
from mmrl.runtime.board import Board, GoneError
from mmrl.runtime.process_probe import Silence
from mmrl.runtime.program import PATIENCE
from mmrl.runtime.stall_watchdog import Sign, StallWatchdog, Stuck, no_progress

_EVERY = 0.5
_LEAVE = 5.0
"""Seconds in which the process may end by itself after another was lost: its collectives then fail, or hang."""
_SAID = 100
"""The newest lines that a sign of life carries."""


def whereabouts() -> JsonObject:
    """This process, so that another of the same host can read its state."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return {"host": platform.node(), "space": space, "pid": os.getpid(), "since": psutil.Process().create_time()}


class Vigil:
    """Final class: a thread that gives a sign of life, and looks for those of others, until ``close``.

    ``others``: ``whereabouts`` by rank. ``leave``: ends this process if it does not end by itself after another was
    lost; it gets the reason.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        others: dict[int, JsonObject],
        patience: float,
        pulse: StallWatchdog,
        leave: Callable[[str], None],
        show: Callable[[str], None] = print,
        called: Callable[[int], str] = lambda rank: "",
    ) -> None:
        self._board, self._rank, self._size = board, rank, len(others)
        self._watched = [r for r in others if r != rank and (rank == 0 or r == 0)]
        self._others, self._patience, self._pulse = others, patience, pulse
        self._leave, self._show, self._called = leave, show, called
        self._here = whereabouts()
        self._seen: dict[int, tuple[Json, float]] = {}
        self._silences: dict[int, Silence] = {}
        self._signs: dict[int, Sign] = {}
        self._printed = dict.fromkeys(others, 0)
        self._lines: deque[str] = deque(maxlen=_SAID)
        self._said = 0
        self._broken = False
        self._end: JsonObject | None = None
        self.ended: dict[int, JsonObject] = {}
        """How others ended, by rank."""
        self._closing = threading.Event()
        self.lost = ""
        """Who was lost, and how; empty as long as nobody is."""
        self.failed: JsonObject | None = None
        """The last note of a process that has ended with an error; ``lost`` is then that error."""
        self._asked = 0.0
        """When the board was asked something that it has not answered; 0 if it has."""
        self._thread = threading.Thread(target=self._run, name="vigil", daemon=True)
        self._second = threading.Thread(target=self._see_board, name="vigil-board", daemon=True)

    def begin(self) -> None:
        """Give the first sign of life."""
        self._beat(0)

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
                self._beat(-1)

    def all_ended(self) -> bool:
        """Wait until all watched processes have ended; False if one was lost, or ended with an error."""
        with self._pulse.waiting():
            while not self.lost and len(self.ended) < len(self._watched) and self._thread.is_alive():
                time.sleep(_EVERY / 5)
        return not self.lost

    def tell(self, line: str) -> None:
        """Send a line of this process to the terminal."""
        if self._rank:
            self._lines.append(line)
            self._said += 1

    def broken(self, seconds: float) -> str:
        """After a connection between the processes broke: who was lost, as soon as it is known; empty if nobody is."""
        self._broken = True
        until = time.monotonic() + seconds
        while not self.lost and time.monotonic() < until and self._thread.is_alive():
            time.sleep(_EVERY / 5)
        return self.lost

    def name(self, rank: int) -> str:
        return (
            f"controller {rank} of {self._size} (process {self._others[rank]['pid']} on {self._others[rank]['host']})"
        )

    def _run(self) -> None:
        number = 0
        while not self._closing.wait(_EVERY):
            number += 1
            try:
                self._asked = time.monotonic()
                self._beat(number)
                self.lost = self._look()
                self._asked = 0.0
            except GoneError:
                self._asked = 0.0
                called = self._called(0)
                self.lost = (
                    f"{self.name(0)} has died{called}"
                    if called
                    else f"{self.name(0)} has ended, or the launcher on its host: where all meet nobody answers"
                )
            if self.lost:
                with suppress(GoneError):
                    self._board.write("lost", self.lost)
                if not self._closing.wait(_LEAVE):
                    self._leave(self.lost)
                return

    def _see_board(self) -> None:
        """Watch the other thread: the board does not answer as long as the process that keeps it is stopped."""
        while not self._closing.wait(_EVERY) and not self.lost:
            asked = self._asked
            seconds = time.monotonic() - asked if asked else 0.0
            if seconds > 4 * _EVERY and (why := self._silent(0, seconds) if self._rank else ""):
                self.lost = why
                if not self._closing.wait(_LEAVE):
                    self._leave(why)

    def _beat(self, number: int) -> None:
        self._signs[self._rank] = sign = Sign() if self._end else self._pulse.sign(begun())
        note: dict[str, Json] = {"n": number, "broken": self._broken, "end": self._end}
        note |= {"said": self._said, "lines": list(self._lines), "sign": asdict(sign)}
        self._board.write(f"beat/{self._rank}", note)

    def _look(self) -> str:
        """Who is lost, and how."""
        if self._rank and self._board.has("lost"):
            return str(self._board.read("lost"))
        watched = [rank for rank in self._watched if rank not in self.ended]
        notes = self._board.read_all([f"beat/{rank}" for rank in watched])
        for rank, note in zip(watched, map(as_object, notes), strict=True):
            before = self._seen.get(rank)
            if before is None or before[0] != note["n"]:
                self._seen[rank] = note["n"], time.monotonic()
                self._silences.pop(rank, None)
                self._signs[rank] = _sign(as_object(note["sign"]))
                self._broken = self._broken or bool(note["broken"])
                self._print(rank, note)
                if note["end"]:
                    self.ended[rank] = end = as_object(note["end"])
                    if end["error"]:
                        self.failed = end
                        return str(end["error"])
            elif why := self._silent(rank, time.monotonic() - before[1]):
                return why
        return no_progress(self._signs, self.name) if self._rank == 0 else ""

    def _print(self, rank: int, note: JsonObject) -> None:
        """Show the lines that are new."""
        lines, said = note["lines"], note["said"]
        assert isinstance(lines, list)
        assert isinstance(said, int)
        new = min(said - self._printed[rank], len(lines))
        self._printed[rank] = said
        for line in lines[len(lines) - new :] if self._rank == 0 else ():
            self._show(f"controller {rank} of {self._size}: {line}")

    def _silent(self, rank: int, seconds: float) -> str:
        """Why a process that has given no sign of life for ``seconds`` counts as lost; empty if it does not yet."""
        silence = self._silences.setdefault(rank, Silence())
        its = self._others[rank]
        if (its["host"], its["space"]) == (self._here["host"], self._here["space"]):
            if seconds > 2 * _EVERY and _ended(its):
                return f"{self.name(rank)} has died{self._called(rank)}"
            pid = its["pid"]
            assert isinstance(pid, int)
            silence.see(process_probe.read(pid))
        frozen = f"{self.name(rank)} has given no sign of life for {seconds:.0f} s"
        if seconds > min(PATIENCE, self._patience) and (silence.stopped or self._broken):
            return f"{frozen}; {silence if silence.stopped else 'its connections are closed'}"
        if seconds <= self._patience:
            return ""
        return (
            f"{frozen}; {silence}. If a reward or a data set of yours holds Python's lock (GIL) for so long, raise "
            "runtime.patience"
        )


def _sign(note: JsonObject) -> Sign:
    return Sign(**{**note, "stuck": Stuck(**as_object(note["stuck"])) if note["stuck"] else None})  # pyright: ignore[reportArgumentType]


def _ended(its: JsonObject) -> bool:
    """Whether the process, of this host, has ended."""
    pid = its["pid"]
    assert isinstance(pid, int)
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE or process.create_time() != its["since"]
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
