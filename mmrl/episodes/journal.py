"""What environments answered, kept beside the run: a step that is taken again does not ask again. Imports no torch.

    episodes/000012.jsonl      the answers of training step 12, counted from 0
    episodes/evaluation.jsonl  those of the evaluation under way, evaluation-000012.jsonl those of one after step 12

A call leaves two rows, ``{"slot", "attempt", "sample", "turn", "after"}`` with ``"asked": true`` before it and with
``"told"`` or ``"failed"`` behind it; ``after`` is a digest of all that the policy wrote before, so that an answer to
other words is none. Turn 0 is ``reset``. A call whose second row is missing was under way when the run ended.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmrl.core.episode import Observation
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.lines import lines_of, rows_of
from mmrl.core.media import Media
from mmrl.core.trajectory import SampleId

FOLDER = "episodes"
GROUP = -1
"""The sample of a group's beginning, which its prompt shows; that of evaluations is the same in each."""
_STEPS = 8
"""Steps whose answers are remembered: asynchronous rollouts are a few steps ahead."""
_Key = tuple[int, int, int, int, str]


@dataclass(frozen=True)
class Kept:
    """What a call of an earlier start returned, or why it failed. ``lost``: it was under way when that start ended."""

    told: tuple[Observation, ...] = ()
    failure: str = ""
    lost: bool = False


class Journal:
    """Final class. The answers of the run in ``folder``, which may be that of one of its controllers; what all of them
    wrote is known. ``replayed``: the number of steps before the evaluation that is taken again, by a replay, which
    adds nothing. Methods may be called from several threads."""

    def __init__(self, folder: Path, replayed: int | None = None) -> None:
        self._folder, self._replayed = folder, replayed
        self._known: dict[int, dict[_Key, Kept]] = {}
        self._reading = threading.Lock()
        self.taken = self.missing = 0
        """Calls that the journal answered, and those that it could not."""

    def answer(self, id: SampleId, turn: int, after: str) -> Kept | None:
        """What the call returned in an earlier start of the run; None where it was not made. Raises ``UserError``."""
        with self._reading:
            if id.step not in self._known:
                self._known[id.step] = self._read(id.step)
                for old in sorted(step for step in self._known if step >= 0)[:-_STEPS]:
                    del self._known[old]
            found = self._known[id.step].get((id.slot, id.attempt, id.sample, turn, after))
            self.taken += found is not None
            self.missing += found is None
            return found

    def asks(self, id: SampleId, turn: int, after: str) -> None:
        """Note that the call begins."""
        self._write(id, {**_place(id, turn, after), "asked": True})

    def tells(self, id: SampleId, turn: int, after: str, told: Sequence[Observation], failure: str) -> None:
        """Note what it returned. Raises ``TypeError`` or ``ValueError`` for what JSON has no value for."""
        self._write(id, {**_place(id, turn, after), **outcome(told, failure)})

    def evaluated(self, steps: int) -> None:
        """The evaluation after so many ``steps`` has ended; the next one does not take its answers."""
        self._known.pop(-1, None)
        under_way = self._folder / FOLDER / self._file(-1)
        if under_way.exists():
            under_way.replace(under_way.with_name(f"evaluation-{steps:06d}.jsonl"))

    def _write(self, id: SampleId, row: JsonObject) -> None:
        if self._replayed is None:
            lines_of(self._folder / FOLDER / self._file(id.step)).append(row)

    def _file(self, step: int) -> str:
        if step >= 0:
            return f"{step:06d}.jsonl"
        return "evaluation.jsonl" if self._replayed is None else f"evaluation-{self._replayed:06d}.jsonl"

    def _read(self, step: int) -> dict[_Key, Kept]:
        root = self._folder.parent.parent if self._folder.parent.name == "controllers" else self._folder
        found: dict[_Key, Kept] = {}
        for folder in (root, *sorted(root.glob("controllers/*/"))):
            for file in sorted((folder / FOLDER).glob("evaluation-*.jsonl")) if step < 0 else ():
                found |= {key: kept for key, kept in _kept(rows_of(file)).items() if key[2] == GROUP}
            found |= _kept(rows_of(folder / FOLDER / self._file(step)))
        return found


def outcome(told: Sequence[Observation], failure: str) -> JsonObject:
    """What a call returned, or why it failed, in JSON."""
    return {"failed": failure} if failure else {"told": [_row(one) for one in told]}


def outcome_of(row: JsonObject) -> Kept:
    """What ``outcome`` made of it; lost where it made no such row."""
    told, failed = row.get("told"), row.get("failed")
    if isinstance(told, list):
        return Kept(tuple(_observation(one) for one in told if isinstance(one, dict)))
    return Kept(failure=failed) if isinstance(failed, str) else Kept(lost=True)


def digest(tokens: Iterable[int]) -> str:
    """The digest of what the policy wrote in an episode so far."""
    return hashlib.blake2b(b"".join(token.to_bytes(4, "little") for token in tokens), digest_size=12).hexdigest()


def _place(id: SampleId, turn: int, after: str) -> dict[str, int | str]:
    return {"slot": id.slot, "attempt": id.attempt, "sample": id.sample, "turn": turn, "after": after}


def _kept(rows: Iterable[JsonObject]) -> dict[_Key, Kept]:
    """What the rows of a file say; a row that is not as this module writes it says nothing."""
    found: dict[_Key, Kept] = {}
    for row in rows:
        numbers = [row.get(name) for name in ("slot", "attempt", "sample", "turn")]
        slot, attempt, sample, turn = (n if isinstance(n, int) else -2 for n in numbers)
        key = slot, attempt, sample, turn, str(row.get("after"))
        kept = outcome_of(row)
        if not kept.lost:
            found[key] = kept
        elif row.get("asked") is True:
            found.setdefault(key, kept)
    return found


def _row(one: Observation) -> JsonObject:
    shown: list[Json] = [
        part if isinstance(part, str) else {"image": base64.b64encode(part.data or b"").decode()} for part in one.parts
    ]
    content = one.content if isinstance(one.content, str) else shown
    row: dict[str, Json] = {"content": content, "reward": one.reward, "done": one.done, "truncated": one.truncated}
    return row | {"call_id": one.call_id, "info": dict(one.info)} | ({"hidden": True} if one.hidden else {})


def _content(kept: object) -> str | tuple[str | Media, ...]:
    """What ``_row`` made of a content."""
    if not isinstance(kept, list):
        return kept if isinstance(kept, str) else ""
    parts = list[str | Media]()
    for part in kept:
        match part:
            case str():
                parts.append(part)
            case {"image": str(data)}:
                parts.append(Media("image", data=base64.b64decode(data)))
            case _:
                pass
    return tuple(parts)


def _observation(row: JsonObject) -> Observation:
    content, reward, call, info = (row.get(name) for name in ("content", "reward", "call_id", "info"))
    return Observation(
        _content(content),
        float(reward) if isinstance(reward, int | float) else 0.0,
        row.get("done") is True,
        row.get("truncated") is True,
        call if isinstance(call, str) else "",
        info if isinstance(info, dict) else {},
        row.get("hidden") is True,
    )
