"""Tables that Hugging Face ``datasets`` reads: Parquet, folders of ``save_to_disk``, folders laid out like those of the
hub, and data sets on the hub. None of them runs code of the data's.

What is on this machine is checked before the library sees it: every file is a regular one inside the folder, none is
packed, and what it unpacks to is limited (``mmrl.data.columnar``).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.json_types import Cell, Json, elements
from mmrl.core.untrusted import check_folder, open_file, printable, read_json, resolved, walk
from mmrl.data.columnar import ROWS, check_arrow, check_parquet, check_row
from mmrl.data.limits import LIMITS
from mmrl.data.rows import Rows
from mmrl.data.text_rows import SUFFIXES, TextRows, open_text

_HUB_FORMATS = ("json", "csv", "parquet", "arrow", "text", "imagefolder", "videofolder")
"""What a data set on the hub may be made of. Others of ``datasets``' readers unpickle."""
_STATE, _SPLITS = "state.json", "dataset_dict.json"
"""What ``datasets``' ``save_to_disk`` writes into its folder: of one data set, and of several splits."""
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"\xfd7zXZ\x00": "xz",
    b"Rar!": "rar",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"\x04\x22\x4d\x18": "lz4",
}
"""How packed files begin, which ``datasets`` would unpack, whatever their names."""
_TAR = 257, b"ustar"
_NAMED = 8
_AT_ONCE = 64 << 20
"""Bytes of Parquet that are unpacked at once."""


class Table(Rows):
    """A Hugging Face ``Dataset``, its media as they are stored. Raises ``UserError`` for one that is too large."""

    in_files = False

    def __init__(self, path: str, rows: Any, source_split: str) -> None:
        self.name = Path(path).stem
        self._where = Path(path).name
        if len(rows) > LIMITS.records:
            raise UserError(
                f"path: {path} has {len(rows):,} records; at most {LIMITS.records:,} are read; take a part of a split, "
                f"split: {source_split}[:{LIMITS.records}], or fewer files"
            )
        if len(rows.column_names) > LIMITS.columns:
            raise UserError(
                f"path: {path} has {len(rows.column_names):,} columns; at most {LIMITS.columns:,} are read; keep those "
                "that the recipe names"
            )
        self._rows = rows.with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, i: int) -> str:
        return f"{self._where} row {i}"

    def row(self, i: int) -> Cell:
        """Raises ``ValueError`` for one that is too large."""
        found = self._rows[i]
        check_row(found)
        return found.to_pylist()[0]


class Joined(Rows):
    """The records of several text files, one file behind the other."""

    def __init__(self, path: str, parts: Sequence[TextRows]) -> None:
        self.name = Path(path).stem
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def where(self, i: int) -> str:
        part, at = self._place(i)
        return part.where(at)

    def row(self, i: int) -> Cell:
        """Raises ``ValueError``."""
        part, at = self._place(i)
        return part.row(at)

    def _place(self, i: int) -> tuple[TextRows, int]:
        n = bisect_right(self._ends, i)
        return self._parts[n], i - (self._ends[n - 1] if n else 0)


def open_table(path: str, source_split: str, subset: str | None) -> Table | Joined:
    """The records of a table. Raises ``UserError``."""
    try:
        rows = _loaded(path, source_split, subset)
    except UserError:
        raise
    except Exception as error:  # of the network, the hub and every reader of a format
        raise UserError(_unread(path, error)) from error
    return rows if isinstance(rows, Joined) else Table(path, rows, source_split)


def is_table(folder: Path) -> bool:
    """Whether ``folder`` holds a table: Parquet files, or what ``save_to_disk`` wrote."""
    return any((folder / name).is_file() for name in (_STATE, _SPLITS)) or has_file(folder, ".parquet")


def has_file(folder: Path, suffix: str) -> bool:
    """Whether a file below ``folder`` has this suffix."""
    try:
        return any(file.suffix == suffix for file in walk(folder))
    except OSError:  # said where it is read
        return False


def _loaded(path: str, source_split: str, subset: str | None) -> Any:
    import datasets

    file = Path(path)
    if file.is_dir():
        with _refusing(file):
            check_folder(file)
        if (file / _STATE).is_file() or (file / _SPLITS).is_file():
            _check_saved(file)
            return _of_split(datasets.load_from_disk(path), path, source_split)
        files = sorted(file.glob("*.parquet"))
        return _parquet(files) if files else _from_builder(path, source_split, subset)
    if file.suffix.lower() == ".parquet":
        return _parquet([file])
    if file.exists():
        raise UserError(
            f"path: {path} is no .jsonl, .json, .csv, .tsv or .parquet file, nor a folder of .parquet or of datasets' "
            "save_to_disk; convert it"
        )
    return _from_builder(path, source_split, subset)


def _parquet(files: Sequence[Path]) -> Any:
    import datasets

    with _refusing(files[0] if len(files) == 1 else files[0].parent):
        most = max(check_parquet(file, file.parent if len(files) > 1 else None) for file in files)
    at_once = max(1, min(1000, ROWS * _AT_ONCE // max(1, most)))
    return datasets.load_dataset("parquet", data_files=list(map(str, files)), split="train", batch_size=at_once)


@contextmanager
def _refusing(path: Path) -> Generator[None]:
    """What is wrong inside with a file of a stranger, at ``path`` or below it, is a ``UserError``."""
    try:
        yield
    except OSError as error:
        named = printable(str(error.filename or path))
        raise UserError(f"path: {named} is not read: {error.strerror}; remove it, or name another path") from error
    except ValueError as error:
        raise UserError(f"path: {error}; take a part of it, or save it anew") from error


def _check_saved(folder: Path) -> None:
    """Check the files of a folder of ``save_to_disk``, which its state names. Raises ``UserError``."""
    with _refusing(folder):
        try:
            splits = [folder]
            if (folder / _SPLITS).is_file():
                said = read_json(folder / _SPLITS, most=LIMITS.beside, root=folder)
                splits = [folder / name for name in _texts(said, "splits")]
            for split in splits:
                resolved(split, folder)
                said = read_json(split / _STATE, most=LIMITS.beside, root=folder)
                files = said.get("_data_files") if isinstance(said, Mapping) else None
                for one in elements(files):
                    check_arrow(split / _texts(one, "filename", several=False)[0], folder)
                read_json(split / "dataset_info.json", most=LIMITS.beside, root=folder)
        except ValueError as error:
            raise UserError(
                f"path: {folder} is no folder of save_to_disk that can be read: {error}; save it again"
            ) from error


def _texts(said: Json, key: str, *, several: bool = True) -> list[str]:
    """The text or the texts under ``key``. Raises ``ValueError``."""
    found = said.get(key) if isinstance(said, Mapping) else None
    texts = [one for one in (found if several and isinstance(found, list) else [found]) if isinstance(one, str)]
    if not texts or texts != (found if several else [found]):
        raise ValueError(f"{key} is {printable(repr(found), 60)}")
    return texts


def _from_builder(path: str, source_split: str, subset: str | None) -> Any:
    """A data set on the hub, or a folder laid out like one. No code of its own is run: from version 4 on ``datasets``
    refuses data sets that have some."""
    import datasets

    builder = datasets.load_dataset_builder(path, subset)
    kind = type(builder).__module__.split(".")[-1]
    if kind not in _HUB_FORMATS:
        raise UserError(f"path: {path} is no plain table ({type(builder).__module__}); convert it to JSONL")
    if os.path.isdir(path):
        files = {str(split): [Path(str(one)) for one in of] for split, of in (builder.config.data_files or {}).items()}
        _check_files([file for of in files.values() for file in of], Path(path))
        if kind == "json":
            if source_split not in files:
                raise UserError(_no_split(path, source_split, list(files)))
            return Joined(path, [open_text(file, Path(path)) for file in files[source_split]])
    builder.download_and_prepare()
    splits = list(builder.info.splits or ())
    if splits and source_split.partition("[")[0] not in splits:
        raise UserError(_no_split(path, source_split, splits))
    return builder.as_dataset(split=source_split)


def _check_files(files: Sequence[Path], folder: Path) -> None:
    """Check the files that a local folder's own card or layout names. Raises ``UserError``."""
    for file in files:
        with _refusing(folder):
            with open_file(file, root=folder) as opened:
                head = opened.read(512)
            packed = next((kind for begin, kind in _PACKED.items() if head.startswith(begin)), None)
            if packed or head[_TAR[0] :].startswith(_TAR[1]):
                raise UserError(f"path: {printable(str(file))} is packed ({packed or 'tar'}); unpack it beforehand")
            if file.suffix.lower() == ".parquet":
                check_parquet(file)
            elif file.suffix.lower() == ".arrow":
                check_arrow(file, folder)
            elif file.suffix.lower() in SUFFIXES:
                open_text(file, folder)


def _of_split(found: Any, path: str, source_split: str) -> Any:
    """The split of what was saved; of a single data set the whole."""
    if not isinstance(found, Mapping):
        return found
    if source_split not in found:
        raise UserError(_no_split(path, source_split, list(found)))
    return found[source_split]


def _no_split(path: str, source_split: str, there: Sequence[str]) -> str:
    return f"split: {path} has no split {source_split!r}; it has {', '.join(map(str, there[:_NAMED]))}"


def _unread(path: str, error: Exception) -> str:
    """What to say where ``datasets`` could not read ``path``."""
    first = printable("".join(str(error).strip().splitlines()[:1]))
    said = f"path: {path} cannot be read as a data set ({type(error).__name__}: {first}); "
    if isinstance(error, ConnectionError) or "offline" in type(error).__name__.lower():
        return said + (
            f"the hub cannot be reached: where it can, run hf download --repo-type dataset {path} --local-dir DIR, "
            "and name DIR as path"
        )
    return said + "name a .jsonl, .json, .csv, .tsv or .parquet file, or a data set, a subset and a split of the hub"
