"""Files of JSON lines that only grow: a row is whole or absent, whichever thread or process wrote it. Imports no torch.

A last line that a crash tore off is dropped, and so is any other that is not a JSON object.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.stored import LARGEST_LINES
from mmrl.core.untrusted import open_file, parse_json

_OPEN: dict[Path, Lines] = {}
_OPENING = threading.Lock()
_PIECE = 1 << 16
"""Bytes that are read at a time."""


class Lines:
    """A JSONL file to which several threads and processes append. Use ``lines_of``: one object per file and process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        _drop_torn_line(path)

    def append(self, *rows: JsonObject, durable: bool = False) -> None:
        """Write rows so that each is whole or absent; ``durable``: they are on the disk when this returns. Raises
        ``UserError`` where the disk is full."""
        if not rows:
            return
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        with self._lock:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("ab", buffering=0) as file:
                    fcntl.flock(file, fcntl.LOCK_EX)  # the devices of a controller write here too
                    append_whole(file, text.encode("utf-8", "replace"), durable=durable)
            except OSError as error:
                raise UserError(f"cannot write {self.path}: {error.strerror or error}; free space there") from error


def append_whole(file: io.FileIO, data: bytes, *, durable: bool = False) -> None:
    """Add ``data`` to the end of ``file``, all of it or nothing; ``durable``: it is on the disk when this returns.
    Raises ``OSError``."""
    before = file.seek(0, os.SEEK_END)
    try:
        if file.write(data) != len(data):
            raise OSError("the disk is full")
        if durable:
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(before)
        raise


def lines_of(path: Path) -> Lines:
    """The one appender of ``path`` in this process."""
    path = Path(os.path.abspath(path))
    with _OPENING:
        if path not in _OPEN:
            _OPEN[path] = Lines(path)
        return _OPEN[path]


def rows_of(path: Path) -> Iterator[JsonObject]:
    """The rows of a JSONL file that are JSON objects; none where there is no file. Raises ``UserError``."""
    try:
        with opened(path) as file:
            for line in file:
                if (row := row_of(line)) is not None:
                    yield row
    except FileNotFoundError:
        return


def opened(path: Path) -> io.BufferedReader:
    """The file for reading. Raises ``FileNotFoundError``, and ``UserError`` where it cannot be read or is too large."""
    try:
        return open_file(path, most=LARGEST_LINES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; mend or remove it") from error


def row_of(line: bytes, *, strict: bool = False) -> dict[str, Any] | None:
    """The object of a line, None where it holds none; ``strict``: as of ``parse_json``."""
    try:
        row = parse_json(line, strict=strict)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _drop_torn_line(path: Path) -> None:
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = kept = file.seek(0, os.SEEK_END)
            newline = -1
            while kept and newline < 0:  # in pieces from the end: not every file system can map a file
                start = max(0, kept - _PIECE)
                file.seek(start)
                newline = file.read(kept - start).rfind(b"\n")
                kept = start + newline + 1
            if kept < end:
                file.truncate(kept)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; mend or remove it") from error
