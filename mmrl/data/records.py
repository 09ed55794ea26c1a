"""The return value of a data set: a lazy sequence of prompts, and the records that were left out.

Order, resume and sharding need nothing more than ``len`` and ``[i]``: an epoch is one global permutation of the indices
(``mmrl.core.randomness.permutation``) and a controller takes every ``size``-th place of it.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from mmrl.core.errors import UserError
from mmrl.core.json_types import Json
from mmrl.core.media import Media
from mmrl.core.trajectory import Prompt
from mmrl.core.untrusted import printable
from mmrl.data.limits import LIMITS

_NAMED = 5
_DIGESTED = 2000
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class BadRecord:
    """A record that was left out: ``where`` it is (file, line, member) and ``why`` it cannot be used."""

    where: str
    why: str

    def __post_init__(self) -> None:
        """Make both fit into a line: they may hold names and texts of strangers."""
        object.__setattr__(self, "where", printable(self.where))
        object.__setattr__(self, "why", printable(self.why))

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


def leave_out(bad: list[BadRecord], where: str, why: str, source: str) -> None:
    """Append a record to ``bad``. Raises ``UserError`` for too many of them: they would fill the memory."""
    bad.append(BadRecord(where, why))
    if len(bad) > LIMITS.bad:
        named = "; ".join(map(str, bad[:_NAMED]))
        raise UserError(
            f"path: more than {LIMITS.bad:,} records of {source} cannot be used ({named}; ...); mend or remove them"
        )


class Records(Sequence[Prompt]):
    """``length`` prompts, each made by ``get(i)`` when it is asked for; nothing is kept.

    ``bad``: what was left out of the whole source, before it was split. ``seen``: records of the whole source, the bad
    ones among them.
    """

    def __init__(self, length: int, get: Callable[[int], Prompt], bad: Iterable[BadRecord] = (), seen: int = 0) -> None:
        self.bad = list(bad)
        self.seen = max(seen, length + len(self.bad))
        self._length, self._get = length, get

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self._get(i) for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"prompt {index} of {self._length}")
        return self._get(index % self._length)


def checked(prompts: Sequence[Prompt], max_bad_fraction: float) -> list[BadRecord]:
    """The records that were left out of ``prompts``, for the run directory.

    Raises ``UserError`` where they are more than ``max_bad_fraction`` of their source: it may be the wrong source.
    """
    bad: list[BadRecord] = list(getattr(prompts, "bad", ()))
    seen = getattr(prompts, "seen", len(prompts) + len(bad))
    if len(bad) > max_bad_fraction * seen:
        named = "; ".join(map(str, bad[:_NAMED])) + ("; ..." if len(bad) > _NAMED else "")
        raise UserError(
            f"{len(bad)} of {seen} records cannot be used, more than {max_bad_fraction:.0%} ({named}); mend or remove "
            "them, or allow a larger share"
        )
    return bad


def digest_of_prompts(prompts: Sequence[Prompt]) -> str:
    """A hash of the content of ``prompts``, wherever their files lie; of many, of their number and of 2,000 at equal
    distances. A file of a picture or clip counts by its size."""
    found = hashlib.blake2b(str(len(prompts)).encode(), digest_size=16)
    for i in range(0, len(prompts), -(-len(prompts) // _DIGESTED) or 1):
        try:
            prompt = prompts[i]
        except UserError:  # named when it is used
            continue
        for medium in prompt.media:
            found.update(repr((medium.kind, medium.frames, medium.data or _size(medium))).encode("utf-8", "replace"))
        said = {name: value for name, value in vars(prompt).items() if value and name != "media"}
        found.update(_ADDRESS.sub("", repr(said)).encode("utf-8", "replace"))
    return found.hexdigest()


def _size(medium: Media) -> int | None:
    try:
        return medium.size if medium.path is None or medium.size is not None else os.stat(medium.path).st_size
    except OSError:
        return None


def check_split(split: str, there: str, known: Sequence[str] = ("train", "heldout")) -> None:
    """Raise ``UserError`` for a split that is unknown; ``there`` begins with what it says of those there are."""
    if split not in known:
        *others, last = map(repr, known)
        raise UserError(f"split is {split!r}; {there} {', '.join(others)} and {last}")


def number_of(text: str) -> int:
    """A number that depends on ``text`` alone, on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def is_held_out(text: str) -> bool:
    """Whether what is generated from ``text`` belongs to the fifth that is held out."""
    return number_of(text) % 5 == 0


def count_held_out(heldout: Json, total: int, source: str, what: str = "records", counted: str = "records") -> int:
    """How many of ``total`` are held out, by a number of them or a fraction. Raises ``UserError`` for what is neither,
    and where none is left; ``what`` they are, and how they are ``counted``."""
    if isinstance(heldout, bool) or not isinstance(heldout, int | float) or not 0 <= heldout < math.inf:
        raise UserError(f"heldout is {heldout!r}; give a number of {what} (8) or a fraction of them (0.1)")
    if heldout >= 1 and heldout != int(heldout):
        raise UserError(f"heldout is {heldout}; a number of {what} is whole, a fraction is below 1")
    n = int(heldout) if heldout >= 1 else math.ceil(heldout * total)
    if n >= total and heldout:
        raise UserError(
            f"heldout is {heldout} and {source} has {total} {counted}, which leaves none to train on; lower heldout in "
            f"data.train and data.heldout, or add {what}"
        )
    return n


def in_split(digests: Sequence[str], split: str, heldout: Json, source: str) -> list[int]:
    """The indices that belong to ``split``, ascending.

    ``digests`` are hashes of the records' content. The lowest are held out: ``heldout`` of them (an integer) or that
    share (a fraction below 1, rounded up). Records of equal content fall on the same side, and what is added to
    a source moves few of those that were there. 0 gives the whole source to either split, for data that comes in two
    parts. Raises ``UserError`` for a split that is unknown or leaves nothing to train on.
    """
    check_split(split, "the data set has")
    distinct = sorted(set(digests))
    n = count_held_out(heldout, len(distinct), source, counted="distinct records")
    if n == 0:
        return list(range(len(digests)))
    apart = set(distinct[:n])
    return [i for i, d in enumerate(digests) if (d in apart) == (split == "heldout")]
