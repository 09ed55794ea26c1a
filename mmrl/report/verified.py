"""Print the result of a replay of recorded steps, in 80 columns."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mmrl.core.json_types import Json, JsonObject

WIDTH = 80
_NAME = 34
_SHOWN = 8
"""Of a part that is not listed whole only values that differ are shown, and so many."""
_OWN = ("step", "nonfinite")
"""Keys of a row that are no metrics."""


@dataclass(frozen=True)
class Compared:
    """One value. ``what``: the value, or how the two differ, in lines."""

    name: str
    same: bool
    what: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """Values of one ``kind`` (``numbers``), and what they are ``of``. ``listed``: show those that are equal too."""

    kind: str
    of: str
    found: Sequence[Compared]
    listed: bool = False

    @property
    def same(self) -> int:
        return sum(one.same for one in self.found)

    @property
    def equal(self) -> bool:
        return self.same == len(self.found)

    def lines(self) -> list[str]:
        lines = [f"{self.of}: {self.same} of {len(self.found)} {self.kind} are the same to the bit"]
        shown = [one for one in self.found if self.listed or not one.same]
        for one in shown if self.listed else shown[:_SHOWN]:
            first, *rest = one.what or ("",)
            head = f"  {one.name:<{_NAME}} {'same   ' if one.same else 'DIFFERS'}"
            if len(one.name) > _NAME:
                lines.append(f"  {one.name}")
                head = f"{'':{_NAME + 2}} {'same   ' if one.same else 'DIFFERS'}"
            lines += [f"{head} {first}".rstrip(), *(f"{'':{_NAME + 11}}{line}" for line in rest)]
        if not self.listed and len(shown) > _SHOWN:
            lines.append(f"  and {len(shown) - _SHOWN} more that differ")
        return lines


@dataclass(frozen=True)
class Verified:
    """The outcome for ``step``: its ``parts``, and ``notes`` on what was compared, and how."""

    step: int
    start: str
    parts: Sequence[Part]
    notes: Sequence[str]

    @property
    def equal(self) -> bool:
        return all(part.equal for part in self.parts)

    def __str__(self) -> str:
        lines = [f"step {self.step}, replayed from {self.start}", ""]
        for part in self.parts:
            lines += part.lines()
        lines.append("")
        for note in self.notes:
            lines += textwrap.wrap(note, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        counts = ", ".join(f"{part.same} of {len(part.found)} {part.kind}" for part in summed(self.parts))
        said = "the same to the bit" if self.equal else "NOT the same"
        last = f"step {self.step} is {said}: {counts} are the same"
        return "\n".join([*lines, *textwrap.wrap(last, WIDTH, subsequent_indent="  ")])


def summed(parts: Iterable[Part]) -> list[Part]:
    """All parts of a kind as one."""
    kinds: dict[str, list[Compared]] = {}
    for part in parts:
        kinds.setdefault(part.kind, []).extend(part.found)
    return [Part(kind, "", found) for kind, found in kinds.items()]


def compared(recorded: JsonObject, replayed: JsonObject, names: Iterable[str]) -> list[Compared]:
    """Two rows of a JSONL file, number by number; ``names``: those to compare, of which ``replayed`` may lack some."""
    found = []
    for name in names:
        if name not in replayed:
            found.append(Compared(name, False, (f"recorded {_number(recorded[name])}", "the replay has none")))
            continue
        one, other = recorded[name], replayed[name]
        same = json.dumps(one) == json.dumps(other)  # which says every bit of a float
        apart = (f"recorded {_number(one)}", f"replayed {_number(other)}", *_distance(one, other))
        found.append(Compared(name, same, (_number(one),) if same else apart))
    return found


def metrics_of(row: JsonObject) -> list[str]:
    """The names of the metrics in a row."""
    return [name for name in row if name not in _OWN]


def _number(value: Json) -> str:
    return "not finite" if value is None else json.dumps(value)


def _distance(one: Json, other: Json) -> tuple[str, ...]:
    if not isinstance(one, int | float) or not isinstance(other, int | float) or one == other:
        return ()
    return (f"apart by {abs(other - one) / max(abs(one), abs(other)):.1e} of it",) if math.isfinite(one) else ()
