"""Prompts from a file: one per line (``.txt``), or one JSON object per line (``.jsonl``).

A line of JSON is ``{"prompt": "...", "id": "...", "meta": {...}}``; ``text`` or ``caption`` is taken for ``prompt``
too, and ``id`` and ``meta`` (what a reward may know) may be left out. A line that cannot be read is skipped, counted
and named in a warning; where more than a tenth cannot be read, the file is not what it seems and that is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt
from mmrl.core.untrusted import open_file, parse_json, printable
from mmrl.data.fields import clean_text, negative_of, size_of
from mmrl.data.limits import LIMITS
from mmrl.data.records import check_split, count_held_out
from mmrl.data.split_lines import split_lines

MAX_BAD = 0.1
"""The share of lines that may be unreadable."""
_NAMED = 5
_TEXT = ("prompt", "text", "caption")
_LONGEST_ID = 1000


class SkippedLines(UserWarning):
    """Lines of a prompt file were left out; the message names the first of them."""


def prompts(split: Literal["train", "heldout"] = "train", *, path: str, heldout: float = 0.1) -> list[Prompt]:
    """The prompts of ``split``, in the file's order, each text once.

    ``heldout``: the last N prompts (an integer), or the last share of them (a fraction below 1, rounded up), are
    held out; 0 gives the whole file to either split, for data that comes as two files. Raises ``UserError`` for a file
    that is missing, empty, of another kind or mostly unreadable, and for a split that leaves nothing.
    """
    check_split(split, "a prompt file has")
    found = _read(Path(path))
    n = count_held_out(heldout, len(found), path, "prompts", "prompts")
    if n == 0:
        return found
    return found[-n:] if split == "heldout" else found[:-n]


def _read(path: Path) -> list[Prompt]:
    read = {".txt": _line_of_text, ".jsonl": _line_of_json}.get(path.suffix.lower())
    if read is None:
        raise UserError(
            f"path: {path} is neither .txt (a prompt a line) nor .jsonl (an object a line); rename or convert it"
        )
    found: dict[tuple[str, str | None, str], Prompt] = {}
    ids: set[str] = set()
    bad, repeated = _Tally(), _Tally()
    for number, line in _lines(path):
        try:
            prompt = read(line, f"{path.stem}:{number}")
            if prompt.id in ids:
                raise ValueError(f"the id {prompt.id!r} is already taken")
        except ValueError as error:
            bad.add(f"line {number}: {printable(str(error))}")
            continue
        content = (prompt.text, prompt.negative_prompt, repr(prompt.size))
        if content in found:
            repeated.add(str(number))
            continue
        if len(found) == LIMITS.prompts:
            raise UserError(
                f"path: {path} has more than {LIMITS.prompts:,} prompts, which are kept in memory; take a part of it, "
                "or read it as .jsonl with name: jsonl"
            )
        ids.add(prompt.id)
        found[content] = prompt
    _report(path, len(found) + repeated.count, bad, repeated)
    return list(found.values())


@dataclass
class _Tally:
    """How many lines there are of a kind, and the first of them."""

    count: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        self.count += 1
        if len(self.named) < _NAMED:
            self.named.append(name)

    def listed(self, between: str) -> str:
        return between.join(self.named) + (f"{between}..." if self.count > _NAMED else "")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1. Raises ``UserError``."""
    try:
        with open_file(path) as file:
            for number, (line, _) in enumerate(split_lines(file, LIMITS.record), start=1):
                if number > LIMITS.records:
                    raise UserError(f"path: {path} has more than {LIMITS.records:,} lines; take a part of it")
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UserError(
            f"path: {path} cannot be read ({error.strerror}); put your prompts there, one a line, or correct "
            "data.train.path and data.heldout.path"
        ) from error


def _line_of_text(line: bytes, name: str) -> Prompt:
    """Raises ``ValueError`` saying what is wrong with the line."""
    try:
        return Prompt(name, clean_text(line.decode("utf-8")))
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None


def _line_of_json(line: bytes, name: str) -> Prompt:
    """Raises ``ValueError`` saying what is wrong with the line."""
    if len(line) > LIMITS.record:
        raise ValueError(f"has more than {LIMITS.record:,} bytes")
    record = parse_json(line)
    if not isinstance(record, dict):
        raise ValueError(f"is a JSON {type(record).__name__}, not an object")
    text = next((record[key] for key in _TEXT if key in record), None)
    if not isinstance(text, str):
        raise ValueError('has no text under "prompt" (or "text", "caption")')
    meta = record.get("meta", {})
    if not isinstance(meta, dict):
        raise ValueError('"meta" is not an object')
    identity = record.get("id", name)
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise ValueError('"id" is neither text nor a whole number')
    if identity != name and str(identity) != printable(str(identity), _LONGEST_ID):
        raise ValueError(f'"id" has characters that are no text, or more than {_LONGEST_ID:,}')
    size = size_of(record, {})
    return Prompt(str(identity), clean_text(text), meta, negative_prompt=negative_of(record), size=size)


def _report(path: Path, good: int, bad: _Tally, repeated: _Tally) -> None:
    total = good + bad.count
    if not total:
        raise UserError(f"path: {path} has no prompts; write one a line")
    if bad.count > MAX_BAD * total:
        raise UserError(
            f"path: {bad.count} of {total} lines of {path} cannot be read, more than {MAX_BAD:.0%} "
            f"({bad.listed('; ')}); mend or remove them"
        )
    if bad.count:
        warnings.warn(f"{path}: skipped {bad.count} of {total} lines ({bad.listed('; ')})", SkippedLines, stacklevel=4)
    if repeated.count:
        warnings.warn(
            f"{path}: {repeated.count} prompts came before and are taken once (lines {repeated.listed(', ')})",
            SkippedLines,
            stacklevel=4,
        )
