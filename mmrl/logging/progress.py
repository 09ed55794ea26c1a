"""Progress on stderr: a live bar with the time left on a terminal, plain lines elsewhere (a log file, CI), and nothing
where the process is to be quiet (``mmrl.core.notices.silenced``)."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from mmrl.core import notices
from mmrl.core.durations import duration
from mmrl.core.secrets import hidden
from mmrl.logging.metrics import of_pairs

PLAIN_EVERY = 5.0
"""Seconds between plain lines, at least."""

_WIDE = 110
"""Columns of a terminal from which a bar is long and has the time since the start beside it."""

_live: RichProgress | None = None
"""The bar on screen: a bar inside another (evaluation inside training) becomes a second line of it."""


class _Mark(NamedTuple):
    """Where the work stood at a time."""

    time: float
    units: int
    spent: float


class Progress:
    """``with Progress(120, "train", "steps") as p: p.advance(1, text="reward 0.41")``.

    ``done`` is what an earlier process did already (it does not count for the speed). ``spent``: the share of another
    limit that is used up, where one may end the work before ``total`` (CPU time). ``file`` is stderr unless given;
    whether it is a terminal decides between the bar and plain lines.
    """

    def __init__(
        self,
        total: int,
        label: str,
        unit: str = "",
        done: int = 0,
        file: TextIO | None = None,
        spent: float = 0.0,
    ) -> None:
        self.total, self.label, self.unit = total, label, unit
        self.done, self.spent = done, spent
        self.text = ""
        self._file = file if file is not None else sys.stderr
        self._bar: RichProgress | None = None
        self._owns_bar = False

    def __enter__(self) -> Progress:
        self._start = self._shown = time.monotonic()
        self._from = self._now = self._mark()
        self._advances = 0
        self._printed = -1
        if self._file.isatty() and not notices.silent():
            self._open_bar()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        global _live
        if self._bar is None:
            if self._printed != self.done:
                self._print("" if kind is None else "stopped ")
        elif self._owns_bar:
            self._bar.stop()
            _live = None
        else:
            self._bar.remove_task(self._task)

    def advance(self, n: int = 1, text: str | None = None, spent: float = 0.0) -> None:
        """``n`` more units are done; ``text`` (kept until the next one) stands beside them."""
        notices.alive()
        self.done += n
        self.spent = spent
        self.text = self.text if text is None else text
        self._advances += 1
        if self._advances == 2:  # before the first there is work that no other has: a first evaluation, warming up
            self._from = self._now
        self._now = self._mark()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._share)
        elif time.monotonic() - self._shown >= PLAIN_EVERY:
            self._print()

    def line(self, text: str, *, paced: bool = True) -> None:
        """Print a line that stays, above the bar. ``paced`` False: the time until now was for other work, such as a
        first evaluation, and does not count for the speed."""
        if not paced:
            self._from = self._now = self._mark()
        text = hidden(text)
        if notices.silent(text):
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._file, flush=True)

    @property
    def count(self) -> str:
        """``12/125 steps``; ``12/~62 steps`` where another limit comes first, at about so many."""
        total = str(self.total)
        units, spent = self._now.units - self._from.units, self._now.spent - self._from.spent
        if spent > 0 and self.spent < 1:
            most = self.done + math.ceil((1 - self.spent) / spent * units)
            total = total if most >= self.total else f"~{most}"
        return f"{self.done}/{total} {self.unit}".rstrip()

    @property
    def elapsed(self) -> str:
        """The time since the start."""
        return f"in {duration(time.monotonic() - self._start)}"

    @property
    def left(self) -> str:
        """The time to what comes first, the last unit or the other limit, at the pace so far; empty before the first
        unit and after the last."""
        now, began = self._now, self._from
        ends = [(1 - now.spent, now.spent - began.spent)]
        if self.total:
            ends.append(((self.total - now.units) / self.total, (now.units - began.units) / self.total))
        seconds = min((rest / pace * (now.time - began.time) for rest, pace in ends if pace > 0), default=0.0)
        since = time.monotonic() - now.time
        return f"{duration(max(0.0, seconds - since))} left" if seconds > 0 else ""

    def _mark(self) -> _Mark:
        return _Mark(time.monotonic(), self.done, self.spent)

    @property
    def _share(self) -> float:
        """The share of the work that is done."""
        return max(self.done / self.total if self.total else 1.0, self.spent)

    def _print(self, prefix: str = "") -> None:
        self._shown, self._printed = time.monotonic(), self.done
        if notices.silent():
            return
        over = self.done >= self.total or self.spent >= 1
        parts = [f"{self.label}: {prefix}{self.count}", self.elapsed if over else self.left]
        print("  ".join(p for p in [*parts, self.text] if p), file=self._file, flush=True)

    def _open_bar(self) -> None:
        global _live
        if _live is None:
            console = Console(file=self._file)
            wide = console.width >= _WIDE

            def says(what: str, **column: Any) -> ProgressColumn:
                return TextColumn(
                    f"{{task.fields[of].{what}}}",
                    markup=False,
                    table_column=Column(no_wrap=True, overflow="ellipsis", **column),
                )

            _live = RichProgress(
                says("label", max_width=24),
                BarColumn(bar_width=24 if wide else 8),
                says("count"),
                *([says("elapsed")] if wide else ()),
                says("left"),
                says("text", ratio=1),  # it takes the width that is left
                console=console,
                expand=True,
            )
            _live.start()
            self._owns_bar = True
        self._bar = _live
        self._task = _live.add_task(self.label, total=1.0, of=self)
        _live.update(self._task, completed=self._share)


def status_line(row: Mapping[str, float]) -> str:
    """One training step on one line, beside a bar, which shows the step and the time left. ``row``: of metrics.jsonl;
    what it lacks is left out."""
    parts = []
    if "reward/mean" in row:
        spread = f" ±{row['reward/std']:.2g}" if "reward/std" in row else ""
        parts.append(f"reward {_number(row['reward/mean'])}{spread}")
    parts += [f"{key} {_number(row[key])}" for key in of_pairs(row) if key.endswith(("/accuracy", "/margin"))]
    if "policy/kl" in row:
        parts.append(f"kl {_number(row['policy/kl'])}")
    if "time/step" in row:
        parts.append(f"{row['time/step']:.3g} s/step")
    return "  ".join(parts)


def _number(value: float) -> str:
    """Four significant digits or so, without an exponent where a plain number is readable."""
    if math.isnan(value):
        return "-"
    if not math.isfinite(value) or value == 0:
        return str(value)
    return f"{value:.3f}" if 0.01 <= abs(value) < 1000 else f"{value:.3g}"
