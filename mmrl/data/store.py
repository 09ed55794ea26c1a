"""Small JSON files about data (indexes, results of checks): in its folder, or in the cache if that is read-only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

from mmrl.core.json_types import JsonObject
from mmrl.core.untrusted import read_json
from mmrl.data.limits import LIMITS


def load(home: Path, stamp: JsonObject, *, beside: bool = True) -> JsonObject | None:
    """The content that ``save`` wrote with an equal ``stamp``; None where it is missing, stale or broken. Not
    ``beside`` the data, only in the cache: who made the data cannot have written it."""
    for place in _places(home, beside):
        try:
            found = read_json(place, most=LIMITS.stored, root=place.parent, values=LIMITS.stored // 8)
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and found.get("stamp") == stamp:
            return found
    return None


def save(home: Path, stamp: JsonObject, content: JsonObject, *, beside: bool = True) -> Path | None:
    """Write ``content`` to ``home``, or to the cache. Returns the path; None where neither can be written."""
    text = json.dumps({"stamp": stamp, **content}, separators=(",", ":"))
    for place in _places(home, beside):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            handle, aside = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name[:40]}-")
        except OSError:
            continue
        try:
            with open(handle, "w") as file:
                file.write(text)
            os.chmod(aside, 0o644)
            os.replace(aside, place)
        except OSError:  # a full disk, or a folder of that name
            with contextlib.suppress(OSError):
                os.unlink(aside)
            continue
        return place
    return None


def stamp_of(path: Path) -> dict[str, int]:
    """The size and time of the file at ``path``, which change when the file changes. Raises ``OSError``."""
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _places(home: Path, beside: bool) -> list[Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(os.path.abspath(home).encode()).hexdigest()[:32]
    kept = cache / "mmrl" / "index" / f"{name}.json"
    return [home, kept] if beside else [kept]
