"""Check media once: broken files are found before training, and the results are stored for the next start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from mmrl.core.json_types import Json
from mmrl.core.media import BadMediaError, Media, probe_clip, probe_image
from mmrl.data import store

Verify = Literal["decode", "headers"]
"""``decode`` decodes pictures whole and up to 16 frames of a clip; ``headers`` reads what the first bytes declare (and
one frame of a clip), which finds files that are something else but few that are cut off."""
VERSION = 1


class Look(TypedDict):
    """``width`` and ``height`` in pixels, and of a clip its ``frames`` and ``fps``."""

    width: int
    height: int
    frames: NotRequired[int]
    fps: NotRequired[float]


def look(media: Media, verify: Verify) -> Look:
    """Read the size of a picture or clip, and of a clip how many frames it has. Raises ``BadMediaError``."""
    if media.kind == "image":
        width, height = probe_image(media, decode=verify == "decode")
        return {"width": width, "height": height}
    info = probe_clip(media, decode=verify == "decode")
    return {"width": info.width, "height": info.height, "frames": info.frames, "fps": info.fps}


class MediaChecks:
    """Results of ``look`` for media files, stored in the JSON file ``home``.

    A result is used again while the file's size and time are the same. ``save`` writes the new results.
    """

    def __init__(self, home: Path, verify: Verify) -> None:
        self._home = home
        self._verify: Verify = verify
        self._stamp = {"version": VERSION, "verify": verify}
        found = store.load(home, self._stamp)
        kept = found.get("checked") if found else None
        self._known: dict[str, Json] = kept if isinstance(kept, dict) else {}
        self._fresh = 0

    def check(self, media: Media, name: str, stamp: list[int] | None = None) -> None:
        """Raise ``ValueError`` where ``media`` cannot be used. A stored result of the same ``name`` and ``stamp`` is
        valid; ``stamp`` is the size and time of the file unless given."""
        if stamp is None:
            try:
                status = os.stat(media.path or "")
            except (OSError, ValueError) as error:
                raise ValueError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
            stamp = [status.st_size, status.st_mtime_ns]
        known = self._known.get(name)
        if isinstance(known, list) and len(known) == 2 and known[0] == stamp:
            why = known[1]
        else:
            why = None
            try:
                look(media, self._verify)
            except BadMediaError as error:
                why = str(error)
            self._known[name] = [stamp, why]
            self._fresh += 1
        if isinstance(why, str):
            raise ValueError(why)

    def save(self) -> None:
        """Store the results since the last call."""
        if self._fresh:
            store.save(self._home, self._stamp, {"checked": self._known})
            self._fresh = 0
