"""The records of a file, a folder or a data set on the hub, each read when it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from mmrl.core.json_types import Cell
from mmrl.data.tables import open_table
from mmrl.data.text_rows import SUFFIXES, open_text

KINDS = ".jsonl, .json, .csv, .tsv or .parquet"
"""Files that are read, for messages."""


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
    return open_text(file) if file.suffix.lower() in SUFFIXES else open_table(path, source_split, subset)
