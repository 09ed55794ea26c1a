"""The records of a file, a folder or a data set on the hub, each read when it is asked for.

JSONL and CSV are read record by record, not through a table: there one bad line would take the file with it, and two
answers of different types would not go into one column. The rest goes through Hugging Face ``datasets``, which runs no
code of the data's.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from mmrl.datasets.fields import parse_json
from mmrl.errors import UserError
from mmrl.json_types import Cell
from mmrl.media import LIMITS

KINDS = ".jsonl, .json, .csv, .tsv or .parquet"
"""Files that are read, for messages."""
_HUB_FORMATS = ("json", "csv", "parquet", "arrow", "text", "imagefolder", "videofolder")
"""What a data set on the hub may be made of. Others of ``datasets``' readers unpickle."""
_SAVED = ("state.json", "dataset_dict.json")
"""What ``datasets``' ``save_to_disk`` writes into its folder."""
_UTF8_MARK = b"\xef\xbb\xbf"


class Rows(Protocol):
    """Records by index."""

    name: str
    """Short, for the ids of prompts."""
    in_files: bool
    """Whether media are files or inline text, which are checked before the start."""

    def __len__(self) -> int: ...

    def where(self, i: int) -> str:
        """Where the record stands, for messages."""
        ...

    def key(self, i: int) -> int:
        """The record's part of the prompt's id."""
        ...

    def row(self, i: int) -> Cell:
        """The record. Raises ``ValueError``."""
        ...


def open_rows(path: str, source_split: str, subset: str | None) -> Rows:
    """The records at ``path``. Raises ``UserError`` where it is nothing that can be read."""
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix == ".jsonl" or (suffix == ".json" and _is_lines(file)):
        return Lines(file)
    if suffix in (".csv", ".tsv"):
        return Csv(file, "\t" if suffix == ".tsv" else ",")
    return Table(path, source_split, subset)


def is_table(folder: Path) -> bool:
    """Whether ``folder`` holds a table: Parquet files, or what ``save_to_disk`` wrote."""
    return any((folder / name).is_file() for name in _SAVED) or next(folder.rglob("*.parquet"), None) is not None


class Lines:
    """A JSONL file: where each line that is not blank begins, and the line itself when it is asked for."""

    in_files = True

    def __init__(self, file: Path) -> None:
        self.name = file.stem
        self._file = file
        self._lines: list[tuple[int, int, int]] = []
        """Number from 1, first byte, bytes."""
        with _opened(file) as lines:
            at = 0
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    self._lines.append((number, at, len(line)))
                at += len(line)

    def __len__(self) -> int:
        return len(self._lines)

    def where(self, i: int) -> str:
        return f"{self._file.name}:{self._lines[i][0]}"

    def key(self, i: int) -> int:
        return self._lines[i][0]

    def row(self, i: int) -> Cell:
        number, at, size = self._lines[i]
        line = _slice(self._file, at, size)
        return parse_json(line.removeprefix(_UTF8_MARK) if number == 1 else line)


class Csv:
    """A CSV or TSV file whose first line names the columns. Values are text; an empty one is None.

    A record may have line breaks inside quotes; not ``quoted``, these are characters like others. A record with another
    number of values than the header is bad.
    """

    in_files = True

    def __init__(self, file: Path, delimiter: str = ",", *, quoted: bool = True) -> None:
        self.name = file.stem
        self._quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
        self._file, self._delimiter = file, delimiter
        self._records: list[tuple[int, int, int]] = []
        """Number of the first line from 1, first byte, bytes."""
        self._header: list[str] = []
        csv.field_size_limit(LIMITS.bytes * 4 // 3 + 64)  # a picture in base64
        with _opened(file) as opened:
            for number, at, size in self._places(opened):
                if self._header:
                    self._records.append((number, at, size))
                else:
                    self._header = self._names(_slice(file, at, size))

    def __len__(self) -> int:
        return len(self._records)

    def where(self, i: int) -> str:
        return f"{self._file.name}:{self._records[i][0]}"

    def key(self, i: int) -> int:
        return self._records[i][0]

    def row(self, i: int) -> Cell:
        _, at, size = self._records[i]
        values = self._values(_slice(self._file, at, size))
        if len(values) != len(self._header):
            raise ValueError(f"has {len(values)} values, and the header {len(self._header)} columns")
        return {name: value or None for name, value in zip(self._header, values, strict=True)}

    def _places(self, opened: io.BufferedReader) -> Iterator[tuple[int, int, int]]:
        """Each record that is not blank: number of its first line, first byte, bytes."""
        read = 0  # lines, and their bytes
        size = 0

        def lines() -> Iterator[str]:
            nonlocal read, size
            for line in opened:
                read, size = read + 1, size + len(line)
                yield line.decode("latin-1")  # the bytes one by one: where quotes and delimiters are does not change

        reader = csv.reader(lines(), delimiter=self._delimiter, quoting=self._quoting)
        number = at = 0
        while True:
            try:
                values = next(reader, None)
            except csv.Error as error:
                raise UserError(
                    f"path: {self._file} is no CSV from line {number + 1} on ({error}); look for a quote that is not "
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
            raise UserError(f"path: the header of {self._file} {error}; save the file as UTF-8") from error
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"path: {self._file} has two columns {twice!r}; rename one")
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


class Table:
    """A table that Hugging Face ``datasets`` reads, its media as they are stored."""

    in_files = False

    def __init__(self, path: str, source_split: str, subset: str | None) -> None:
        self.name = Path(path).stem
        self._where = Path(path).name
        self._rows = _load_table(path, source_split, subset).with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, i: int) -> str:
        return f"{self._where} row {i}"

    def key(self, i: int) -> int:
        return i

    def row(self, i: int) -> Cell:
        return self._rows[i].to_pylist()[0]


def _load_table(path: str, source_split: str, subset: str | None) -> Any:
    """A Hugging Face ``Dataset``. Raises ``UserError``."""
    import datasets

    file = Path(path)
    kind = {".json": "json", ".parquet": "parquet"}.get(file.suffix.lower())
    files = [str(file)] if file.is_file() else sorted(map(str, file.glob("*.parquet"))) if file.is_dir() else []
    if file.is_file() and kind is None:
        raise UserError(
            f"path: {path} is no {KINDS} file, nor a folder of .parquet or of datasets' save_to_disk; convert it"
        )
    try:
        if file.is_dir() and any((file / name).is_file() for name in _SAVED):
            return _of_split(datasets.load_from_disk(path), path, source_split)
        if files:
            return datasets.load_dataset(kind or "parquet", data_files=files, split="train")
        return _from_builder(path, source_split, subset)
    except UserError:
        raise
    except Exception as error:  # of the network, the hub and every reader of a format
        raise UserError(_unread(path, error)) from error


def _from_builder(path: str, source_split: str, subset: str | None) -> Any:
    """A data set on the hub, or a folder laid out like one. No code of its own is run: from version 4 on ``datasets``
    refuses data sets that have some."""
    import datasets

    builder = datasets.load_dataset_builder(path, subset)
    if type(builder).__module__.split(".")[-1] not in _HUB_FORMATS:
        raise UserError(f"path: {path} is no plain table ({type(builder).__module__}); convert it to JSONL")
    builder.download_and_prepare()
    splits = list(builder.info.splits or ())
    if splits and source_split.partition("[")[0] not in splits:
        raise UserError(_no_split(path, source_split, splits))
    return builder.as_dataset(split=source_split)


def _of_split(found: Any, path: str, source_split: str) -> Any:
    """The split of what was saved; of a single data set the whole."""
    if not isinstance(found, Mapping):
        return found
    if source_split not in found:
        raise UserError(_no_split(path, source_split, list(found)))
    return found[source_split]


def _no_split(path: str, source_split: str, there: Sequence[str]) -> str:
    return f"split: {path} has no split {source_split!r}; it has {', '.join(map(str, there))}"


def _unread(path: str, error: Exception) -> str:
    """What to say where ``datasets`` could not read ``path``."""
    first = "".join(str(error).strip().splitlines()[:1])
    said = f"path: {path} cannot be read as a data set ({type(error).__name__}: {first}); "
    if isinstance(error, ConnectionError) or "offline" in type(error).__name__.lower():
        return said + (
            f"the hub cannot be reached: where it can, run hf download --repo-type dataset {path} --local-dir DIR, "
            "and name DIR as path"
        )
    return said + f"name a {KINDS} file, or a data set, a subset and a split that the hub has"


def _opened(file: Path) -> io.BufferedReader:
    try:
        return file.open("rb")
    except OSError as error:
        raise UserError(f"path: {file} cannot be read ({error.strerror}); correct the path") from error


def _slice(file: Path, at: int, size: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(at)
        return opened.read(size)


def _is_lines(file: Path) -> bool:
    """Whether a ``.json`` file begins as an object: an object a line."""
    with _opened(file) as opened:
        return opened.read(4096).removeprefix(_UTF8_MARK).lstrip()[:1] == b"{"
