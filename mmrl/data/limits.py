"""The most that is read of a table of records. More is refused or left out, never cut down; docs/data.md lists it."""

from __future__ import annotations

from typing import Final

MIB = 1 << 20


class TableLimits:
    """Limits of data that other people made. They keep reading under ``memory``."""

    record: Final = 32 * MIB
    """Bytes of a record in a text file: a line of JSONL, an element of a JSON list, a row of CSV."""
    row: Final = 256 * MIB
    """Bytes of a row of Parquet or Arrow, pictures and clips among them."""
    text: Final = MIB
    """Characters of a prompt, a message, a system message or a negative prompt."""
    beside: Final = 16 * MIB
    """Bytes of a text or JSON file beside a picture, and of a JSON file that describes a table."""
    stored: Final = 128 * MIB
    """Bytes of a file of results that mmrl itself keeps beside data."""
    columns: Final = 10_000
    """Columns of a table; keys of a record."""
    records: Final = 4_000_000
    """Records of a source."""
    prompts: Final = 1_000_000
    """Prompts of a file that is kept in memory (the data set ``prompts``)."""
    blank: Final = 1_000_000
    """Blank lines behind one another."""
    bad: Final = 100_000
    """Records of a source that are left out and named."""
    unpacked: Final = 256 * MIB
    """Bytes of a table once unpacked, or ``ratio`` times its files' bytes where that is more."""
    ratio: Final = 200
    memory: Final = 512 * MIB
    """Memory that reading a table takes, beside the program's own."""


LIMITS = TableLimits()
