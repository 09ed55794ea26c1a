"""Open the records of a file, a folder or a data set on the hub."""

from __future__ import annotations

from pathlib import Path

from mmrl.data.rows import Rows
from mmrl.data.tables import open_table
from mmrl.data.text_rows import SUFFIXES, open_text

KINDS = ".jsonl, .json, .csv, .tsv or .parquet"
"""Files that are read, for messages."""


def open_rows(path: str, source_split: str, subset: str | None) -> Rows:
    """The records at ``path``. Raises ``UserError`` where it is nothing that can be read."""
    file = Path(path)
    return open_text(file) if file.suffix.lower() in SUFFIXES else open_table(path, source_split, subset)
