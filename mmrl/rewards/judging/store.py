"""A judge's files in the run directory: verdicts by content, and a transcript of every question.

    judge-cache.jsonl         {"key", "verdict", "raw", "sum"}: asked once, known for ever, also to a resumed run
    judge-transcripts.jsonl   {"step", "judge", "sample", "prompt", "response", "request", "answers", "verdict", ...}

Both only grow, a whole line at a time; a last line that a crash tore off is dropped, and so is any other that is not
JSON (it costs one question, not the run). A verdict has a checksum: one that was changed is named and asked again.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from PIL.Image import Image

from mmrl.core.errors import first_of
from mmrl.core.json_types import Json, JsonObject, elements
from mmrl.core.lines import lines_of, opened, row_of
from mmrl.core.media.images import png_bytes
from mmrl.core.notices import tell
from mmrl.logging.texts import encodable
from mmrl.rewards.judging.asking import Outcome, Verdict
from mmrl.rewards.judging.json_answer import whole_numbers

CACHE = "judge-cache.jsonl"
TRANSCRIPTS = "judge-transcripts.jsonl"
THUMBNAIL = 128
"""Pixels of the longer side of a picture in a transcript."""
_NAMED = 8


class Cache:
    """Verdicts by key: in ``folder``'s file where there is one, else in memory alone.

    What other controllers of the run wrote is known too, so that a run resumed with another number of them asks nothing
    again. Damaged lines are named when it opens. Raises ``UserError`` for a file that cannot be opened.
    """

    def __init__(self, folder: Path | None) -> None:
        self._lines = None if folder is None else lines_of(folder / CACHE)
        self._known: dict[str, Outcome] = {}
        for path in _of_the_run(folder) if folder is not None else ():
            found, damaged = _verdicts(path)
            self._known |= found
            if damaged:
                tell(
                    f"warning: {path}: {len(damaged)} verdict{'s' * (len(damaged) > 1)} of {len(found) + len(damaged)} "
                    f"cannot be trusted and will be asked again (lines {first_of(damaged, _NAMED)})"
                )

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Outcome | None:
        return self._known.get(key)

    def put(self, found: Mapping[str, Outcome]) -> None:
        """Store the verdicts. An outcome without a verdict is not stored, so its question is asked again."""
        fresh = {k: o for k, o in found.items() if o.verdict is not None and k not in self._known}
        self._known |= {key: Outcome(o.verdict, o.raw, cached=True) for key, o in fresh.items()}
        if self._lines is not None:
            rows = [{"key": k, "verdict": o.verdict, "raw": list(map(encodable, o.raw))} for k, o in fresh.items()]
            self._lines.append(*({**row, "sum": _sum(row)} for row in rows))


def _of_the_run(folder: Path) -> list[Path]:
    """The cache files of all controllers of a run, that of ``folder``, which is one of theirs, last: it counts."""
    root = folder.parent.parent if folder.parent.name == "controllers" else folder
    own = folder / CACHE
    others = [root / CACHE, *sorted(root.glob(f"controllers/*/{CACHE}"))]
    return [*(path for path in others if path != own), own]


def _verdicts(path: Path) -> tuple[dict[str, Outcome], list[int]]:
    """The verdicts in a file, and the numbers of the lines that are not to be trusted."""
    found: dict[str, Outcome] = {}
    damaged: list[int] = []
    with suppress(FileNotFoundError), opened(path) as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # not while another process is in the middle of a line
        for number, line in enumerate(file, 1):
            row = row_of(line)
            key, verdict = ("", None) if row is None else (row.get("key"), _intact(row))
            if row is None or verdict is None or not isinstance(key, str):
                damaged.append(number)
                continue
            found[key] = Outcome(verdict, texts_of(row.get("raw")), cached=True)
    return found, damaged


def _intact(row: JsonObject) -> Verdict | None:
    """The verdict of a row of the cache, None unless it is as it was written. Rows of earlier versions have no
    checksum."""
    verdict = verdict_of(row.get("verdict"))
    if isinstance(verdict, int | float) and not 0 <= verdict <= 1:
        return None
    if row.keys() <= {"key", "verdict", "raw"}:
        return verdict
    same = row.get("sum") == _sum({name: row.get(name) for name in ("key", "verdict", "raw")})
    return verdict if same else None


def _sum(row: JsonObject) -> str:
    content = json.dumps(row, sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def thumbnail(image: Image) -> str:
    """A small PNG in base64."""
    small = image.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return base64.b64encode(png_bytes(small)).decode("ascii")


def verdict_of(value: Json) -> Verdict | None:
    """The verdict that a row holds, None where it holds none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, dict):
        kept: dict[str, float | str] = {
            n: one for n, one in value.items() if isinstance(one, int | float | str) and not isinstance(one, bool)
        }
        return kept if len(kept) == len(value) else None
    return whole_numbers(value)


def texts_of(value: Json) -> list[str]:
    """The texts of a list that a row holds; empty where it holds none."""
    return [str(text) for text in elements(value)]
