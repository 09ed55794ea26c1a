"""The log of votes of a run, ``votes/votes.jsonl``: it only grows, a line at a time, and imports no torch.

    {"kind": "log", "format": 1, "run": "5f3a...", "votes": "scores"}                     the first line
    {"kind": "vote", "voter": "ann", "time": 1764.2, "samples": ["0/0.0.0.3"], "value": 1}
    {"kind": "undo", "voter": "ann", "time": 1766.0, "samples": ["0/0.0.0.3"]}
    {"kind": "pause", "voter": "ann", "time": 1767.5, "value": true}                      training waits between steps
    {"kind": "enough", "voter": "ann", "time": 1790.1, "value": true}                     it waits for no votes any more
    {"kind": "used", "step": 3, "bytes": 812, "sha256": "...", "fit": [3, 812], "batches": []}

``used`` says which votes, the first ``bytes`` of the log, made the reward of a step, before the step is trained. So a
run that is killed and goes on, or is verified, takes the same votes for the same step.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mmrl.core.errors import UserError
from mmrl.core.grouping import grouped
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.lines import lines_of, row_of
from mmrl.core.untrusted import RefusedFileError, read_file

Votes = Literal["scores", "pairs"]
FOLDER, LOG, ASKS = "votes", "votes.jsonl", "asks.json"
SAMPLE = re.compile(r"\d{1,9}/-?\d{1,9}(\.\d{1,9}){3}")
"""The name of a sample: the step that scored it, and its own step, slot, attempt and number."""
LEAST = 10
"""Votes that are needed: of fewer nothing can be held out."""
_MOST_BYTES, _FORMAT, _LONGEST_NAME = 64 << 20, 1, 40


@dataclass(frozen=True)
class Used:
    """Which votes a step used: the first ``bytes`` of the log. ``fit``: the step and the bytes of the fit that scored
    it; ``batches``: samples of that step itself that the fit knew."""

    bytes: int
    fit: tuple[int, int]
    batches: tuple[str, ...]


@dataclass
class Tally:
    """What a log says. ``given``: the value of each voter's vote about samples; ``events``: how many lines are votes or
    take one back; ``used``: by the step."""

    run: str
    votes: Votes
    size: int
    events: int = 0
    given: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    paused: bool = False
    enough: bool = False
    used: dict[int, Used] = field(default_factory=dict)

    @property
    def means(self) -> dict[tuple[str, ...], float]:
        """The mean vote about samples, over the voters."""
        found = grouped((samples, value) for (_, samples), value in self.given.items())
        return {samples: sum(values) / len(values) for samples, values in found.items()}

    def lacking(self, first: int) -> str:
        """What is still needed before a reward can be made of the votes; empty where nothing is."""
        values = list(self.means.values())
        need = max(first, LEAST)
        if len(values) < need:
            return f"{len(values)} of {need} votes"
        middle = 0.5 if self.votes == "pairs" else sum(values) / len(values)
        if min(sum(v > middle for v in values), sum(v < middle for v in values)) < 2:
            return f"all {len(values)} votes say the same" + ("; votes of the other kind are needed" * (need > 0))
        return ""


class VoteLog:
    """The log in the folder of a run. Any process of this machine may append to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder / FOLDER, folder / FOLDER / LOG

    def begin(self, votes: Votes) -> Tally:
        """Start the log where there is none. Raises ``UserError`` for one with votes of the other kind."""
        if not self.path.exists():
            run = secrets.token_hex(8)
            lines_of(self.path).append({"kind": "log", "format": _FORMAT, "run": run, "votes": votes}, durable=True)
        found = self.read()
        if found.votes != votes:
            raise UserError(
                f"{self.path} has votes that are {found.votes}, and the reward is set to {votes}; set votes: "
                f"{found.votes} in its options, or start another run"
            )
        return found

    def read(self, upto: int | None = None) -> Tally:
        """What the log, or its first ``upto`` bytes, says. Raises ``UserError`` for one that is none, or has votes of
        two kinds."""
        data = self.data()[:upto]
        found: Tally | None = None
        end = data.rfind(b"\n") + 1  # a line that is being written is not there yet
        for number, line in enumerate(data[:end].splitlines(), 1):
            row = row_of(line)
            if found is None:
                found = self._begun(row, end)
            elif row is not None:
                self._take(found, row, number)
        if found is None:
            raise UserError(f"{self.path} is empty; remove it, and the run starts its votes anew")
        return found

    def data(self) -> bytes:
        """The bytes of the log. Raises ``UserError``."""
        try:
            return read_file(self.path, most=_MOST_BYTES, root=self.folder)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}; put it back from a copy") from error

    def write(self, kind: str, **said: Json) -> None:
        """Append a line; it is on the disk when this returns. Raises ``UserError``."""
        lines_of(self.path).append({"kind": kind, **said}, durable=True)

    def write_used(self, step: int, used: Used) -> None:
        """Record which votes ``step`` uses."""
        digest = hashlib.sha256(self.data()[: used.bytes]).hexdigest()
        said: JsonObject = {"bytes": used.bytes, "sha256": digest, "fit": list(used.fit)}
        self.write("used", step=step, **said, batches=list(used.batches))

    def _begun(self, row: JsonObject | None, size: int) -> Tally:
        votes = None if row is None or row.get("kind") != "log" else row.get("votes")
        if row is None or votes not in ("scores", "pairs") or row.get("format") != _FORMAT:
            raise UserError(f"{self.path} is no log of votes that this version reads; put it back from a copy")
        return Tally(str(row.get("run")), votes, size)

    def _take(self, found: Tally, row: JsonObject, number: int) -> None:
        kind, samples = row.get("kind"), samples_of(row.get("samples"))
        if kind in ("vote", "undo"):
            if samples is None or (kind == "vote" and wrong_value(found.votes, samples, row.get("value"))):
                raise UserError(
                    f"{self.path}, line {number}: no vote of the kind {found.votes}, which the log began with; votes "
                    "of two kinds are not mixed: remove the line, or start another run for the other kind"
                )
            key = (str(row.get("voter")), samples)
            found.events += 1
            found.given.pop(key, None)
            if kind == "vote":
                found.given[key] = float(str(row["value"]))
        elif kind in ("pause", "enough"):
            setattr(found, "paused" if kind == "pause" else kind, row.get("value") is True)
        elif kind == "used":
            try:
                step, used = _used(row)
            except (KeyError, TypeError, ValueError):
                raise UserError(f"{self.path}, line {number} cannot be read; put the log back from a copy") from None
            found.used[step] = used

    def check(self, used: Used, step: int) -> None:
        """Raise ``UserError`` where the votes that ``step`` used are not in the log as they were."""
        data = self.data()
        for line in data.splitlines():
            row = row_of(line)
            if row is not None and row.get("kind") == "used" and row.get("step") == step:
                if row.get("sha256") != hashlib.sha256(data[: used.bytes]).hexdigest():
                    raise UserError(f"{self.path} was changed after step {step + 1} used it; put it back from a copy")
                return


def _used(row: Mapping[str, Json]) -> tuple[int, Used]:
    step, size, fit, batches = row["step"], row["bytes"], row["fit"], row["batches"]
    if not (isinstance(step, int) and isinstance(size, int) and isinstance(fit, list) and isinstance(batches, list)):
        raise TypeError
    first, last = (int(str(n)) for n in fit)
    return step, Used(size, (first, last), tuple(map(str, batches)))


def samples_of(value: Json) -> tuple[str, ...] | None:
    """The names of samples that a row holds; None where they are none."""
    if not isinstance(value, list) or not 1 <= len(value) <= 2:
        return None
    return tuple(map(str, value)) if all(isinstance(v, str) and SAMPLE.fullmatch(v) for v in value) else None


def wrong_value(votes: Votes, samples: tuple[str, ...], value: Json) -> str:
    """Why ``value`` is no vote about ``samples``; empty where it is one. Of a pair 1 prefers the first."""
    if len(samples) != (1 if votes == "scores" else 2) or len({*samples}) != len(samples):
        return f"this run asks for {votes}: vote on {'one sample' if votes == 'scores' else 'two samples of a prompt'}"
    known = (0, 0.25, 0.5, 0.75, 1) if votes == "scores" else (0, 0.5, 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value not in known:
        return f"the value of a vote is one of {', '.join(f'{v:g}' for v in known)}"
    return ""


def named(voter: Json) -> str | None:
    """The name of a voter, None where it is none: 1 to 40 printable characters."""
    name = voter.strip() if isinstance(voter, str) else ""
    return name if 0 < len(name) <= _LONGEST_NAME and name.isprintable() else None


def now() -> float:
    """Seconds since 1970, for a line of the log."""
    return round(time.time(), 3)


def place_of(folder: Path, sample: str) -> Path:
    """Where the picture or clip of a sample lies in ``folder``, without its suffix."""
    step, _, rest = sample.partition("/")
    return folder / f"{int(step):06d}" / rest


def asked_in(folder: Path) -> JsonObject:
    """What the run asks for now; empty where it asks for nothing yet. ``folder``: its folder of votes."""
    try:
        row = row_of(read_file(folder / ASKS, most=_MOST_BYTES, root=folder))
    except (FileNotFoundError, RefusedFileError):
        return {}
    return row or {}
