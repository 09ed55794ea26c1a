"""The table of labels: ``labels.csv`` with the columns ``file`` and ``label``; other columns are not read.

A label is 0 or 1 (also no and yes, bad and good), or a score from 0 to 1. Of several lines about a file the last
counts, so that an answer is changed by adding a line. A line whose label is empty takes the label away.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mmrl.errors import UserError

NAME = "labels.csv"
COLUMNS = ("file", "label")
FOLDER = "folder"
"""A column of tables about samples of several folders."""
_WORDS = {"no": 0.0, "yes": 1.0, "bad": 0.0, "good": 1.0, "false": 0.0, "true": 1.0}
LEAST = 10
"""Labels that are needed: of fewer nothing can be held out."""


@dataclass(frozen=True)
class Labels:
    """Labels in [0, 1] by the sample's name. ``binary``: all are 0 or 1. ``words``: they are written as words."""

    of: Mapping[str, float]
    words: bool = False

    @property
    def binary(self) -> bool:
        return all(value in (0.0, 1.0) for value in self.of.values())


def read(path: Path, names: Sequence[str]) -> Labels:
    """The labels of the samples ``names``. Raises ``UserError`` for a table that cannot be read, unknown files, labels
    of two kinds (words and numbers) and labels out of range."""
    known, found = {*names}, dict[str, float]()
    kinds: dict[str, int] = {}
    for number, file, label, _ in _rows(path):
        where = f"{path}, line {number}"
        if file not in known:
            raise UserError(f"{where}: there is no sample {file!r} beside it; correct the name or remove the line")
        if not label:
            found.pop(file, None)
            continue
        kind = "words" if label.lower() in _WORDS else "numbers"
        kinds.setdefault(kind, number)
        found[file] = _value(where, label)
    if len(kinds) > 1:
        raise UserError(
            f"{path} has labels of two kinds: words (line {kinds['words']}) and numbers (line {kinds['numbers']}); "
            "write all as numbers from 0 to 1, or all as yes and no"
        )
    return Labels(found, "words" in kinds)


def check(path: Path, labels: Labels, of: int = 1) -> None:
    """Raise ``UserError`` for labels that teach nothing. ``of``: how many tables they are from, ``path`` the last."""
    values = list(labels.of.values())
    where = str(path) if of == 1 else f"{NAME} of the {of} folders"
    if not values:
        raise UserError(f"{where} has no label; give some with: mmrl label {path.parent}")
    if len(values) < LEAST:
        raise UserError(f"{where} has {len(values)} labels, and {LEAST} or more are needed; label more samples")
    if max(values) - min(values) < 1e-6:
        raise UserError(
            f"all {len(values)} labels in {where} are {values[0]:g}, so nothing can be told apart; label samples of "
            "the other kind too"
        )
    low, high = sum(value < 0.5 for value in values), sum(value >= 0.5 for value in values)
    if labels.binary and min(low, high) < 2:
        raise UserError(
            f"{where} has {low} labels 0 and {high} labels 1, and two of each are needed, so that one can be held out; "
            "label more samples"
        )


def append(path: Path, file: str, label: str) -> None:
    """Add a line, so that it is on the disk when this returns."""
    new = not path.exists() or path.stat().st_size == 0
    line = io.StringIO()
    writer = csv.writer(line, lineterminator="\n")
    if new:
        writer.writerow(COLUMNS)
    writer.writerow((file, label))
    with path.open("ab+") as out:
        if not new:
            out.seek(-1, os.SEEK_END)
            if out.read(1) != b"\n":
                out.write(b"\n")  # the end of a file that an editor left without one, or of a line that was cut off
        out.write(line.getvalue().encode("utf-8", "surrogateescape"))
        out.flush()
        os.fsync(out.fileno())


def files(path: Path, of: Path | None = None) -> list[str]:
    """The column ``file`` of a table. ``of``: only rows about this folder, where the table has a column ``folder``.
    Raises ``UserError``, also where no row is about ``of``."""
    rows = _rows(path, COLUMNS[:1])
    if of is None or not any(row.folder for row in rows):
        return [row.file for row in rows]
    mine = [row.file for row in rows if row.folder and Path(row.folder).resolve() == of.resolve()]
    if not mine:
        raise UserError(
            f"{path} names no sample of {of}; leave out --order, or let mmrl spread propose more with a larger --next"
        )
    return mine


class _Row(NamedTuple):
    number: int
    file: str
    label: str
    folder: str


def _rows(path: Path, columns: Sequence[str] = COLUMNS) -> list[_Row]:
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.DictReader(file)
            lacks = [name for name in columns if name not in (reader.fieldnames or ())]
            if lacks:
                raise UserError(f"{path} has no column {lacks[0]!r}; its first line must be: {','.join(columns)}")
            return [
                _Row(
                    reader.line_num,
                    (row["file"] or "").strip(),
                    (row.get("label") or "").strip(),
                    row.get(FOLDER) or "",
                )
                for row in reader
                if (row["file"] or "").strip()
            ]
    except FileNotFoundError:
        how = f"give labels with: mmrl label {path.parent}" if "label" in columns else "make it with mmrl spread"
        raise UserError(f"there is no {path}; {how}") from None
    except (OSError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _value(where: str, label: str) -> float:
    if label.lower() in _WORDS:
        return _WORDS[label.lower()]
    try:
        value = float(label)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise UserError(
            f"{where}: the label is {label!r}; write a number from 0 to 1 (stars from 1 to 5: 0, 0.25, 0.5, 0.75, "
            "1), or yes and no"
        )
    return value
