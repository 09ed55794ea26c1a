"""A judge's files in the run directory: verdicts by content, and a transcript of every question.

    judge-cache.jsonl         {"key", "verdict", "raw"}: a question is asked once, also in a run that is resumed
    judge-transcripts.jsonl   {"step", "judge", "sample", "prompt", "response", "request", "answers", "verdict", ...}

Lines are only appended, whole. A last line that a crash cut off is dropped, and so is any other that is not JSON: its
question is asked again.
"""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from PIL.Image import Image

from mmrl.errors import UserError
from mmrl.json_types import Json, JsonObject
from mmrl.judge.asking import Outcome, Verdict
from mmrl.judge.json_answer import whole_numbers

CACHE = "judge-cache.jsonl"
TRANSCRIPTS = "judge-transcripts.jsonl"
THUMBNAIL = 128
"""Pixels of the longer side of a picture in a transcript."""
_OPEN: dict[Path, Lines] = {}
_OPENING = threading.Lock()


class Lines:
    """A JSONL file to which several threads and processes append. Use ``lines_of``: one object per file and process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        _drop_torn_line(path)

    def append(self, *rows: JsonObject) -> None:
        """Write rows so that each is whole or absent. Raises ``UserError`` where the disk is full."""
        if not rows:
            return
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        with self._lock:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("ab", buffering=0) as file:
                    fcntl.flock(file, fcntl.LOCK_EX)  # the devices of a controller write here too
                    before, data = file.seek(0, os.SEEK_END), text.encode("utf-8", "replace")
                    try:
                        if file.write(data) != len(data):
                            raise OSError("the disk is full")
                    except OSError:
                        file.truncate(before)
                        raise
            except OSError as error:
                raise UserError(f"cannot write {self.path}: {error.strerror or error}; free space there") from error


class Cache:
    """Verdicts by key: in ``folder``'s file where there is one, else in memory alone."""

    def __init__(self, folder: Path | None) -> None:
        self._lines = None if folder is None else lines_of(folder / CACHE)
        self._known: dict[str, Outcome] = {}
        for row in rows_of(folder / CACHE) if folder is not None else ():
            key, verdict = row.get("key"), verdict_of(row.get("verdict"))
            if isinstance(key, str) and verdict is not None:
                self._known[key] = Outcome(verdict, texts_of(row.get("raw")), cached=True)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Outcome | None:
        return self._known.get(key)

    def put(self, found: Mapping[str, Outcome]) -> None:
        """Store the verdicts. An outcome without a verdict is not stored, so its question is asked again."""
        fresh = {k: o for k, o in found.items() if o.verdict is not None and k not in self._known}
        self._known |= {key: Outcome(o.verdict, o.raw, cached=True) for key, o in fresh.items()}
        if self._lines is not None:
            self._lines.append(*({"key": k, "verdict": o.verdict, "raw": o.raw} for k, o in fresh.items()))


def lines_of(path: Path) -> Lines:
    """The one appender of ``path`` in this process."""
    path = Path(os.path.abspath(path))
    with _OPENING:
        if path not in _OPEN:
            _OPEN[path] = Lines(path)
        return _OPEN[path]


def rows_of(path: Path) -> Iterator[dict[str, Json]]:
    """The rows of a JSONL file that are JSON objects; none where there is no file."""
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict):
                    yield row
    except FileNotFoundError:
        return


def thumbnail(image: Image) -> str:
    """A small PNG in base64."""
    small = image.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def verdict_of(value: Json) -> Verdict | None:
    """The verdict that a row holds, None where it holds none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return whole_numbers(value)


def texts_of(value: Json) -> list[str]:
    """The texts of a list that a row holds; empty where it holds none."""
    return [str(text) for text in value] if isinstance(value, list) else []


def _drop_torn_line(path: Path) -> None:
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = file.seek(0, os.SEEK_END)
            kept, step = end, 1 << 16
            while kept > 0:
                start = max(0, kept - step)
                file.seek(start)
                newline = file.read(kept - start).rfind(b"\n")
                kept = start + newline + 1 if newline >= 0 else start
                if newline >= 0:
                    break
            if kept < end:
                file.truncate(kept)
    except FileNotFoundError:
        return
