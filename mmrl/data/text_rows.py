"""The records of JSONL, JSON and CSV files, each read when it is asked for.

They are not read through a table: there one bad line would take the file with it, and two answers of different types
would not go into one column. A file may be of any size; what is in memory keeps to ``mmrl.data.limits``.
"""

from __future__ import annotations

import csv
import io
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

from mmrl.core.errors import UserError
from mmrl.core.json_types import Cell
from mmrl.core.untrusted import MAX_VALUES, open_file, parse_json, printable
from mmrl.data.limits import LIMITS
from mmrl.data.rows import Rows
from mmrl.data.split_lines import split_lines

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
_UTF8_MARK = b"\xef\xbb\xbf"
_CHUNK = 1 << 16
_BLANK = re.compile(r"[ \t\r\n]*")


def open_text(file: Path, root: Path | None = None) -> TextRows:
    """The records of a ``.jsonl``, ``.json``, ``.csv`` or ``.tsv`` file, which must be inside ``root`` where that is
    given. Raises ``UserError``."""
    suffix = file.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return Csv(file, "\t" if suffix == ".tsv" else ",", root=root)
    if suffix == ".jsonl" or _is_lines(file, root):
        return Lines(file, root)
    return JsonList(file, root)


class _Places(Rows):
    """Where the records of a text file are: number, first byte, bytes. Each is JSON."""

    def __init__(self, file: Path, root: Path | None) -> None:
        self.name = file.stem
        self.file, self.root = file, root
        self._numbers, self._starts, self._sizes = (array("q") for _ in range(3))

    def add(self, number: int, at: int, size: int) -> None:
        """Raises ``UserError`` for too many."""
        if len(self._numbers) == LIMITS.records:
            raise UserError(
                f"path: {self.file} has more than {LIMITS.records:,} records; give a part of it, which is made with: "
                f"head -n {LIMITS.records} FILE > PART"
            )
        for to, value in ((self._numbers, number), (self._starts, at), (self._sizes, size)):
            to.append(value)

    def __len__(self) -> int:
        return len(self._numbers)

    def where(self, i: int) -> str:
        return f"{self.file.name}:{self._numbers[i]}"

    def key(self, i: int) -> int:
        return self._numbers[i]

    def row(self, i: int) -> Cell:
        return parse_json(self.bytes_of(i))

    def opened(self) -> io.BufferedReader:
        """Raises ``UserError``."""
        try:
            return open_file(self.file, root=self.root)
        except OSError as error:
            raise UserError(
                f"path: {printable(str(self.file))} cannot be read ({error.strerror}); correct the path"
            ) from error

    def bytes_of(self, i: int) -> bytes:
        """The bytes of record ``i``. Raises ``ValueError`` for too many."""
        size = self._sizes[i]
        if size > LIMITS.record:
            raise ValueError(f"has {size:,} bytes; at most {LIMITS.record:,} are read")
        return self.slice(self._starts[i], size)

    def slice(self, at: int, size: int) -> bytes:
        with open_file(self.file, root=self.root) as opened:
            opened.seek(at)
            return opened.read(size)


class Lines(_Places):
    """A JSONL file: where each line that is not blank begins, and the line itself when it is asked for."""

    def __init__(self, file: Path, root: Path | None = None) -> None:
        super().__init__(file, root)
        with self.opened() as opened:
            at = 0
            for number, (line, size) in enumerate(split_lines(opened, LIMITS.record), start=1):
                if line.strip():
                    self.add(number, at, size)
                at += size


class JsonList(_Places):
    """A JSON file that is one list: where each element begins, and the element itself when it is asked for."""

    def __init__(self, file: Path, root: Path | None = None) -> None:
        super().__init__(file, root)
        with self.opened() as opened:
            try:
                for number, (at, size) in enumerate(_Elements(opened)):
                    self.add(number, at, size)
            except ValueError as error:
                raise UserError(
                    f"path: {file} is no list of records that can be read: record {len(self)} {error}; mend it, or "
                    "convert it to JSONL"
                ) from error

    def where(self, i: int) -> str:
        return f"{self.file.name} record {i}"


class _Elements:
    """Finds the elements of a JSON list in a file; only what one element needs is in memory.

    The bytes are read as characters, since all structure of JSON is in its ASCII. A parser says where an element ends.
    """

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._text, self._base, self._at, self._all = "", 0, 0, False
        self._decoder = json.JSONDecoder(parse_int=bool, parse_float=bool)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The first byte of each element, and its bytes. Raises ``ValueError``, which goes on after "record N"."""
        self._fill()
        if self._text.startswith(_UTF8_MARK.decode("latin-1")):
            self._at = len(_UTF8_MARK)
        self._expect("[", "does not follow a [")
        if self._next() == "]":
            return
        while True:
            self._next()
            end = self._end()
            yield self._base + self._at, end - self._at
            self._at = end
            if self._next() == "]":
                return
            self._expect(",", "does not follow a comma")

    def _fill(self) -> None:
        """Forget what is behind, and read on, twice as much as is kept."""
        self._base, self._text, self._at = self._base + self._at, self._text[self._at :], 0
        read = self._file.read(max(_CHUNK, len(self._text)))
        self._all = not read
        self._text += read.decode("latin-1")

    def _next(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            found = _BLANK.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text) or self._all:
                return self._text[self._at : self._at + 1]
            self._fill()

    def _expect(self, mark: str, why: str) -> None:
        found = self._next()
        if found != mark:
            raise ValueError(why if found else "is cut off")
        self._at += 1

    def _end(self) -> int:
        """Where the element at this place ends."""
        if self._at == len(self._text):
            raise ValueError("is cut off")
        while True:
            wrong = "is cut off"
            try:
                _, end = self._decoder.raw_decode(self._text, self._at)
                if end < len(self._text) or self._all:  # else a number could go on
                    return end
            except RecursionError:
                raise ValueError("is nested too deeply") from None
            except json.JSONDecodeError as error:
                wrong = f"is not JSON ({error.msg})"
                if error.pos < len(self._text) - 16 and "Unterminated" not in error.msg:
                    raise ValueError(wrong) from None
            held = len(self._text) - self._at
            if self._all:
                raise ValueError(wrong)
            if held > LIMITS.record:
                raise ValueError(f"has more than {LIMITS.record:,} bytes, or {wrong}")
            if sum(self._text.count(mark, self._at) for mark in "[{,") > MAX_VALUES:
                raise ValueError(f"has more than {MAX_VALUES:,} values, or {wrong}")
            self._fill()


class Csv(_Places):
    """A CSV or TSV file whose first line names the columns. Values are text; an empty one is None.

    A record may have line breaks inside quotes; not ``quoted``, these are characters like others. A record with another
    number of values than the header is bad.
    """

    def __init__(self, file: Path, delimiter: str = ",", *, quoted: bool = True, root: Path | None = None) -> None:
        super().__init__(file, root)
        self._quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
        self._delimiter = delimiter
        self._header: list[str] = []
        csv.field_size_limit(LIMITS.record)
        with self.opened() as opened:
            for number, at, size in self._places(opened):
                if self._header:
                    self.add(number, at, size)
                else:
                    self._header = self._names(self.slice(at, size))

    def row(self, i: int) -> Cell:
        values = self._values(self.bytes_of(i))
        if len(values) != len(self._header):
            raise ValueError(f"has {len(values)} values, and the header {len(self._header)} columns")
        return {name: value or None for name, value in zip(self._header, values, strict=True)}

    def _places(self, opened: io.BufferedReader) -> Iterator[tuple[int, int, int]]:
        """Each record that is not blank: number of its first line, first byte, bytes."""
        read = 0  # lines, and their bytes
        size = 0
        number = at = 0

        def lines() -> Iterator[str]:
            nonlocal read, size
            for line, length in split_lines(opened, LIMITS.record):
                read, size = read + 1, size + length
                if size - at > LIMITS.record:
                    raise csv.Error(f"a record of more than {LIMITS.record:,} bytes")
                yield line.decode("latin-1")  # the bytes one by one: where quotes and delimiters are does not change

        reader = csv.reader(lines(), delimiter=self._delimiter, quoting=self._quoting)
        while True:
            try:
                values = next(reader, None)
            except csv.Error as error:
                raise UserError(
                    f"path: {self.file} is no CSV from line {number + 1} on ({error}); look for a quote that is not "
                    "closed, or convert it to JSONL"
                ) from error
            if values is None:
                return
            if any(value.strip() for value in values):
                yield number + 1, at, size - at
            number, at = read, size

    def _names(self, line: bytes) -> list[str]:
        try:
            names = self._values(line.removeprefix(_UTF8_MARK))
        except ValueError as error:
            raise UserError(f"path: the header of {self.file} {error}; save the file as UTF-8") from error
        if len(names) > LIMITS.columns:
            raise UserError(
                f"path: {self.file} has {len(names):,} columns; at most {LIMITS.columns:,} are read; keep those that "
                "the recipe names"
            )
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise UserError(f"path: {self.file} has two columns {printable(twice)!r}; rename one")
        return names

    def _values(self, line: bytes) -> list[str]:
        """Raises ``ValueError``."""
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise ValueError("is not UTF-8") from None
        try:
            lines = io.StringIO(text, newline="")
            return next(csv.reader(lines, delimiter=self._delimiter, quoting=self._quoting, strict=True), [])
        except csv.Error as error:
            raise ValueError(f"is not CSV ({error})") from None


TextRows: TypeAlias = Lines | JsonList | Csv


def _is_lines(file: Path, root: Path | None) -> bool:
    """Whether a ``.json`` file begins as an object: an object a line."""
    with _Places(file, root).opened() as opened:
        return opened.read(4096).removeprefix(_UTF8_MARK).lstrip()[:1] == b"{"
