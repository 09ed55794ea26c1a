"""The table of labels: ``labels.csv`` with the columns ``file`` and ``label``; other columns are not read.

A label is 0 or 1 (also no and yes, bad and good), or a score from 0 to 1. Of several lines about a file the last
counts, so that an answer is changed by adding a line. A line whose label is empty takes the label away. A line that
cannot be read is left out and named.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import stat
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mmrl.config.errors import did_you_mean
from mmrl.core.errors import UserError
from mmrl.core.untrusted import RefusedFileError, printable, read_file, resolved

NAME = "labels.csv"
COLUMNS = ("file", "label")
FOLDER = "folder"
"""A column of tables about samples of several folders."""
_WORDS = {"no": 0.0, "yes": 1.0, "bad": 0.0, "good": 1.0, "false": 0.0, "true": 1.0}
_MOST_BYTES = 64 << 20
_MOST_LINES = 64
"""Lines of a record: a file name may have line breaks in it."""
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")
_QUOTED = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\"',]")
_NAMED = 3
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


class SkippedLabels(UserWarning):
    """Lines of a table of labels were left out; the message names the first of them."""


def read(path: Path, names: Sequence[str]) -> Labels:
    """The labels of the samples ``names``.

    A line that cannot be read is left out, counted and named in a warning: one about a file that there is not, with a
    label that is none, or with a word among numbers. Raises ``UserError`` for a table that cannot be read, one without
    a good line, and one with as many words as numbers.
    """
    known = {*names}
    table, bad = _rows(path)
    good: list[tuple[_Row, float | None]] = []
    for row in table:
        try:
            file = _sample(row.file, known)
            good.append((row._replace(file=file), _value(row.label) if row.label else None))
        except ValueError as error:
            bad.append(f"line {row.number}: {error}")
    words = [row.number for row, value in good if value is not None and row.label.lower() in _WORDS]
    numbers = [row.number for row, value in good if value is not None and row.label.lower() not in _WORDS]
    if len(words) == len(numbers) > 0:
        raise UserError(
            f"{path} has labels of two kinds: words (line {words[0]}) and numbers (line {numbers[0]}); "
            "write all as numbers from 0 to 1, or all as yes and no"
        )
    fewer = {*(words if len(words) < len(numbers) else numbers)}
    bad += [f"line {n}: the label is a {'word' if n in words else 'number'} among others" for n in sorted(fewer)]
    if bad and not good:
        raise UserError(f"{path}, {bad[0]}{_near(table, known)}; correct or remove the line")
    if bad:
        named = "; ".join(bad[:_NAMED]) + ("; ..." if len(bad) > _NAMED else "")
        said = f"{path}: {len(bad)} lines are left out ({named}{_near(table, known)})"
        warnings.warn(said, SkippedLabels, stacklevel=2)
    found: dict[str, float] = {}
    for row, value in good:
        if value is None:
            found.pop(row.file, None)
        elif row.number not in fewer:
            found[row.file] = value
    return Labels(found, len(words) > len(numbers))


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
    """Add a line, so that it is on the disk when this returns. Raises ``OSError``, also for a table that is a link."""
    line = io.StringIO()
    plain = file == file.strip() and not _QUOTED.search(file)
    csv.writer(line, lineterminator="\n", quoting=csv.QUOTE_MINIMAL if plain else csv.QUOTE_ALL).writerow((file, label))
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(resolved(path, path.parent), flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise RefusedFileError(path, "it is no regular file")
    with os.fdopen(handle, "ab+") as out:
        if out.seek(0, os.SEEK_END) == 0:
            out.write(f"{','.join(COLUMNS)}\n".encode())
        else:
            out.seek(-1, os.SEEK_END)
            if out.read(1) != b"\n":
                out.write(b"\n")  # the end of a file that an editor left without one, or of a line that was cut off
        out.write(line.getvalue().encode("utf-8", "surrogateescape"))
        out.flush()
        os.fsync(out.fileno())


def files(path: Path, of: Path | None = None) -> list[str]:
    """The column ``file`` of a table. ``of``: only rows about this folder, where the table has a column ``folder``.
    Raises ``UserError``, also where no row is about ``of``."""
    rows, _ = _rows(path, COLUMNS[:1])
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


def _rows(path: Path, columns: Sequence[str] = COLUMNS) -> tuple[list[_Row], list[str]]:
    """The lines of the table, and what is wrong with those that are none."""
    try:
        root = path.parent if path.name == NAME else None
        text = read_file(path, most=_MOST_BYTES, root=root).decode("utf-8-sig", "surrogateescape")
    except FileNotFoundError:
        how = f"give labels with: mmrl label {path.parent}" if "label" in columns else "make it with mmrl spread"
        raise UserError(f"there is no {path}; {how}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; remove it, or put a copy there") from error
    found: list[_Row] = []
    bad: list[str] = []
    header: list[str] | None = None
    for number, values in _records(text):
        if values is None:
            bad.append(f"line {number}: has a quote that is not closed")
        elif header is None:
            header = values
            lacks = next((name for name in columns if name not in header), None)
            if lacks is not None:
                raise UserError(f"{path} has no column {lacks!r}; its first line must be: {','.join(columns)}")
        else:
            row = dict(zip(header, values, strict=False))
            if row.get("file"):
                found.append(_Row(number, row["file"], row.get("label", "").strip(), row.get(FOLDER, "")))
    if header is None:
        raise UserError(f"{path} has no column {columns[0]!r}; its first line must be: {','.join(columns)}")
    return found, bad


def _records(text: str) -> Iterator[tuple[int, list[str] | None]]:
    """The number of the last line of each record that is not blank, and its values; None for a line whose quote is
    closed nowhere near, which is left alone, so that the lines behind it are read."""
    lines = _LINE.findall(text)
    at = 0
    while at < len(lines):
        reader = csv.reader(lines[at : at + _MOST_LINES], strict=True)
        try:
            values = next(reader, [])
            at += reader.line_num
        except csv.Error:
            values = None
            at += 1
        if values is None or any(values):
            yield at, values


def _sample(file: str, known: Collection[str]) -> str:
    """The sample that a table names, with or without white space around it. Raises ``ValueError``."""
    name = next((one for one in (file, file.strip()) if one in known), None)
    if name is None:
        raise ValueError(f"there is no sample {printable(file.strip())!r} beside it")
    return name


def _near(table: Sequence[_Row], known: Set[str]) -> str:
    """A name like the first one that is no sample's, or the first of those that there are."""
    lost = next((row.file.strip() for row in table if not {row.file, row.file.strip()} & known), None)
    if lost is None or not known:
        return ""
    return printable(did_you_mean(lost, sorted(known)) or f"; one that is there is {min(known)!r}")


def _value(label: str) -> float:
    """Raises ``ValueError`` for what is no label."""
    if label.lower() in _WORDS:
        return _WORDS[label.lower()]
    try:
        value = float(label)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise ValueError(
            f"the label is {printable(label, 40)!r}; write a number from 0 to 1 (stars from 1 to 5: 0, 0.25, 0.5, "
            "0.75, 1), or yes and no"
        )
    return value
