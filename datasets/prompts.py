"""Prompts from a file: one per line (``.txt``), or one JSON object per line (``.jsonl``).

A line of JSON is ``{"prompt": "...", "id": "...", "meta": {...}}``; ``text`` is taken for ``prompt`` too, and ``id``
and ``meta`` (what a reward may know) may be left out. A line that cannot be read is skipped, counted and named in a
warning; where more than a tenth cannot be read, the file is not what it seems and that is an error.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from mmrl.datasets.fields import negative_of, size_of
from mmrl.errors import UserError
from mmrl.json_types import Json
from mmrl.trajectory import Prompt

MAX_BAD = 0.1
"""The share of lines that may be unreadable."""
_NAMED = 5


class SkippedLines(UserWarning):
    """Lines of a prompt file were left out; the message names the first of them."""


def prompts(split: Literal["train", "heldout"] = "train", *, path: str, heldout: float = 0.1) -> list[Prompt]:
    """The prompts of ``split``, in the file's order, each text once.

    ``heldout``: the last N prompts (an integer), or the last share of them (a fraction below 1, rounded up), are
    held out; 0 gives the whole file to either split, for data that comes as two files. Raises ``UserError`` for a file
    that is missing, empty, of another kind or mostly unreadable, and for a split that leaves nothing.
    """
    if split not in ("train", "heldout"):
        raise UserError(f"split is {split!r}; a prompt file has 'train' and 'heldout'")
    found = _read(Path(path))
    n = _held_out(heldout, len(found), path)
    if n == 0:
        return found
    return found[-n:] if split == "heldout" else found[:-n]


def _held_out(heldout: Json, total: int, path: str) -> int:
    if isinstance(heldout, bool) or not isinstance(heldout, int | float) or heldout < 0 or heldout != heldout:
        raise UserError(f"heldout is {heldout!r}; give a number of prompts (8) or a fraction of them (0.1)")
    if heldout >= 1 and heldout != int(heldout):
        raise UserError(f"heldout is {heldout}; a number of prompts is whole, a fraction is below 1")
    n = int(heldout) if heldout >= 1 else math.ceil(heldout * total)
    if n >= total:
        raise UserError(
            f"heldout is {heldout} and {path} has {total} prompts, which leaves none to train on; lower heldout in "
            "data.train and data.heldout, or add prompts"
        )
    return n


def _read(path: Path) -> list[Prompt]:
    read = {".txt": _line_of_text, ".jsonl": _line_of_json}.get(path.suffix.lower())
    if read is None:
        raise UserError(
            f"path: {path} is neither .txt (a prompt a line) nor .jsonl (an object a line); rename or convert it"
        )
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(
            f"path: {path} cannot be read ({error.strerror}); put your prompts there, one a line, or correct "
            "data.train.path and data.heldout.path"
        ) from error
    found: dict[tuple[str, str | None, str], Prompt] = {}
    ids: set[str] = set()
    bad: list[str] = []
    repeated: list[int] = []
    for number, line in _numbered(lines):
        try:
            prompt = read(line.decode("utf-8").strip(), f"{path.stem}:{number}")
            if prompt.id in ids:
                raise ValueError(f"the id {prompt.id!r} is already taken")
        except ValueError as error:
            reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            bad.append(f"line {number}: {reason}")
            continue
        content = (prompt.text, prompt.negative_prompt, repr(prompt.size))
        if content in found:
            repeated.append(number)
            continue
        ids.add(prompt.id)
        found[content] = prompt
    _report(path, len(found) + len(repeated), bad, repeated)
    return list(found.values())


def _numbered(lines: list[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    return ((i, line) for i, line in enumerate(lines, start=1) if line.strip())


def _line_of_text(line: str, name: str) -> Prompt:
    return Prompt(name, _checked(line))


def _line_of_json(line: str, name: str) -> Prompt:
    """Raises ``ValueError`` saying what is wrong with the line."""
    try:
        record: Json = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg})") from error
    except RecursionError as error:
        raise ValueError("is not JSON that can be read (nested too deeply)") from error
    if not isinstance(record, dict):
        raise ValueError(f"is a JSON {type(record).__name__}, not an object")
    text = record.get("prompt", record.get("text"))
    if not isinstance(text, str):
        raise ValueError('has no text under "prompt" (or "text")')
    meta = record.get("meta", {})
    if not isinstance(meta, dict):
        raise ValueError('"meta" is not an object')
    identity = record.get("id", name)
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise ValueError('"id" is neither text nor a whole number')
    size = size_of(record)
    return Prompt(str(identity), _checked(text.strip()), meta, negative_prompt=negative_of(record), size=size)


def _checked(text: str) -> str:
    if not text:
        raise ValueError("the prompt is empty")
    if any(ord(c) < 32 and c != "\t" and c != "\n" for c in text):
        raise ValueError("the prompt has control characters")
    return text


def _report(path: Path, good: int, bad: list[str], repeated: list[int]) -> None:
    named = "; ".join(bad[:_NAMED]) + ("; ..." if len(bad) > _NAMED else "")
    total = good + len(bad)
    if not total:
        raise UserError(f"path: {path} has no prompts; write one a line")
    if len(bad) > MAX_BAD * total:
        raise UserError(
            f"path: {len(bad)} of {total} lines of {path} cannot be read, more than {MAX_BAD:.0%} ({named}); mend or "
            "remove them"
        )
    if bad:
        warnings.warn(f"{path}: skipped {len(bad)} of {total} lines ({named})", SkippedLines, stacklevel=4)
    if repeated:
        first = ", ".join(map(str, repeated[:_NAMED])) + (", ..." if len(repeated) > _NAMED else "")
        warnings.warn(
            f"{path}: {len(repeated)} prompts came before and are taken once (lines {first})",
            SkippedLines,
            stacklevel=4,
        )
