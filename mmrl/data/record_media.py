"""Pictures and clips of a record: where their bytes are, and their order in the prompt."""

from __future__ import annotations

import base64
import binascii
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal
from urllib.parse import unquote

from mmrl.core.json_types import Cell
from mmrl.core.media import KINDS, LIMITS, Media, Show
from mmrl.core.media.decoder import container_of
from mmrl.core.untrusted import resolved

Kind = Literal["image", "video"]
PLACEHOLDERS: dict[Kind, str] = {"image": "<image>", "video": "<video>"}
"""The placeholder of a picture or clip in a prompt's text."""
SHOWN = {
    "fps": "fps",
    "nframes": "count",
    "num_frames": "count",
    "min_frames": "min_frames",
    "max_frames": "max_frames",
    "video_start": "start",
    "video_end": "end",
    "min_pixels": "min_pixels",
    "max_pixels": "max_pixels",
}
"""What a part of a message calls the fields of ``Show``."""
_PICTURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
"""How the formats of pictures begin; WEBP has its name at byte 8."""


def arranged(text: str, media: Sequence[Media]) -> list[Media]:
    """``media`` in the order of the placeholders in ``text``; in their own order where it has none.

    Without media ``<image>`` is an ordinary word. Raises ``ValueError`` as ``make_prompt``.
    """
    asked: list[str] = re.findall("|".join(PLACEHOLDERS.values()), text)
    if not asked or not media:
        return list(media)
    for kind, mark in PLACEHOLDERS.items():
        held = sum(m.kind == kind for m in media)
        if held != asked.count(mark):
            raise ValueError(f"the prompt has {asked.count(mark)} {mark} and the record {held} of them")
    queues = {mark: iter([m for m in media if m.kind == kind]) for kind, mark in PLACEHOLDERS.items()}
    return [next(queues[mark]) for mark in asked]


def media_from(kind: Kind, source: Cell, root: str) -> Media:
    """One medium of a record: bytes, a data URL, base64, or the path of a file inside the folder ``root``.

    Raises ``ValueError`` for everything else: an address on the network, and a path outside ``root`` (by ``..``, from
    ``/`` or through a link).
    """
    if isinstance(source, Mapping):  # as Hugging Face tables hold media that are not decoded, or a part of a message
        found = next((value for key in ("bytes", "path", "url", kind) if (value := source.get(key))), None)
        made = media_from(kind, None if isinstance(found, Mapping) else found, root)
        return replace(made, show=show_of(source))
    if isinstance(source, bytes | bytearray):
        return Media(kind, data=bytes(source))
    if not isinstance(source, str) or not source:
        raise ValueError(f"its {kind} is a {type(source).__name__}, neither bytes nor a path")
    if source.startswith("data:"):
        return Media(kind, data=_from_data_url(source))
    if (data := _from_base64(source)) is not None:
        return Media(kind, data=data)
    if source.startswith("file://"):  # so the examples of Qwen name files
        source = unquote(source.removeprefix("file://"))
    elif "://" in source:
        raise ValueError(f"its {kind} is an address ({source[:80]}); download it and give the file")
    try:
        path = resolved(os.path.join(root, source), root)
    except OSError as error:
        raise ValueError(f"its {kind} {source[:200]!r} is outside {root}: {error.strerror}") from None
    named = KINDS.get(os.path.splitext(path)[1][1:].lower())
    if named not in (None, kind):
        raise ValueError(f"its {kind} {source!r} has the name of a {named}")
    return Media(kind, path=path)


def show_of(part: Mapping[str, Cell]) -> Show | None:
    """What a part of a message says of how its medium is shown, by the names of Qwen's tools; None where it says
    nothing. Raises ``ValueError``."""
    said: dict[str, float] = {}
    for key, name in SHOWN.items():
        value = part.get(key)
        if value is None:
            continue
        whole = name not in ("fps", "start", "end")
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if not (number > 0 or (number == 0 and name == "start")) or math.isinf(number) or (whole and number % 1):
            raise ValueError(f"its {key} is {value!r}; write a {'whole ' if whole else ''}number above 0")
        said[name] = int(number) if whole else number
    if "fps" in said and "count" in said:
        raise ValueError("has fps and nframes for one clip; keep one of them")
    for what in ("pixels", "frames"):
        low, high = said.get(f"min_{what}"), said.get(f"max_{what}")
        if low is not None and high is not None and low > high:
            raise ValueError(f"its min_{what}, {low}, are above its max_{what}, {high}")
    return Show(**said) if said else None  # pyright: ignore[reportArgumentType]


def _from_data_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError(f"its data URL {url[:40]!r} is not base64")
    if len(body) > LIMITS.bytes * 4 // 3 + 4:
        raise ValueError(f"its data URL has {len(body):,} characters, too many")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"its data URL is not base64 ({error})") from None


def _from_base64(text: str) -> bytes | None:
    """The bytes of a picture or clip whose base64 is ``text``; None where it is something else, such as a path.

    Only text that begins as a format that is read does is taken for base64. Raises ``ValueError`` where it is too long.
    """
    head = text[:64]
    if len(text) <= len(head) or not head.isascii():
        return None
    try:
        begin = base64.b64decode(head, validate=True)
    except ValueError:
        return None
    if not begin.startswith(_PICTURES) and begin[8:12] != b"WEBP" and container_of(begin) is None:
        return None
    if len(text) > LIMITS.bytes * 4 // 3 + 4:
        raise ValueError(f"its base64 has {len(text):,} characters, too many")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise ValueError(f"its base64 cannot be decoded ({error})") from None
