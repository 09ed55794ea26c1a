"""How long training will take, by its first step: steps and evaluations to come, up to what ends the run."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """What one of each takes: ``step`` and ``evaluation`` in wall seconds (0 for an evaluation that was not measured),
    ``spent`` the share of train.max_cpu_seconds that a step uses (0 without the limit)."""

    step: float
    spent: float
    evaluation: float


def expected(done: int, total: int, every: int | None, pace: Pace, spent: float, *, may_stop: bool = False) -> str:
    """A line of at most 80 columns: the time, steps and evaluations from step ``done`` to the end.

    The run ends at step ``total`` or where the share ``spent`` of the limit reaches 1, whichever comes first.
    ``every``: steps between evaluations. ``may_stop``: an evaluation may end the run before.
    """
    steps = total - done
    by_limit = math.ceil(max(0.0, 1 - spent) / pace.spent) if pace.spent > 0 else steps
    limited, steps = by_limit < steps, min(by_limit, steps)
    last = done + steps
    evaluations = 0 if every is None else sum(n % every == 0 or n == last for n in range(done + 1, last + 1))
    words = f"{steps} more step{'' if steps == 1 else 's'}"
    if limited:
        words += " (train.max_cpu_seconds)"
    if evaluations:
        counted = "" if pace.evaluation else " not counted"
        words += f", {evaluations} evaluation{'' if evaluations == 1 else 's'}{counted}"
    most = "at most " if may_stop else ""
    return f"{most}about {about(steps * pace.step + evaluations * pace.evaluation)} to go: {words}"


def about(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3 h 20 min``: rounded as an estimate deserves."""
    if seconds < 90:
        return f"{max(10, round(seconds, -1)):.0f} s" if seconds >= 10 else f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    tens = round(minutes / 10)
    return f"{tens // 6} h {tens % 6 * 10:02d} min"
