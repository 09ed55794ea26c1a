"""Pictures and clips that belong to a prompt: references to bytes, never the pixels.

A prompt carries ``Media``; the controller that owns the prompt opens it, once, and keeps what it was encoded to.
``open_image`` and ``open_clip`` take media from strangers: sizes are checked before a pixel is decoded, decoding has a
deadline, clips are decoded in a process of their own, and whatever is wrong with a medium is a ``BadMediaError``.
"""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from PIL import Image

from mmrl.core.media.decoder import Failure, Header, Request, Wanted
from mmrl.core.media.decoding import DecoderLostError, decoders, process_of
from mmrl.core.media.images import BadImageError, read_rgb, watched
from mmrl.core.media_limits import LIMITS as LIMITS
from mmrl.core.media_limits import Limits as Limits
from mmrl.core.untrusted import open_file

T = TypeVar("T")
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""The decoders of pictures that are let near a file, whatever its name says."""
KINDS: dict[str, Literal["image", "video"]] = {
    **dict.fromkeys(("png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff"), "image"),
    **dict.fromkeys(("mp4", "m4v", "mov", "webm", "mkv", "avi"), "video"),
}
"""What a file's suffix (without the dot, lower case) says it is."""
_PROBED = 16
_LOGGED: set[str] = set()
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Show:
    """How a record shows a medium; None takes the recipe's value, then the checkpoint's."""

    fps: float | None = None
    """Frames of a clip per second."""
    count: int | None = None
    """Frames of a clip."""
    min_frames: int | None = None
    max_frames: int | None = None
    start: float | None = None
    """Seconds of a clip."""
    end: float | None = None
    min_pixels: int | None = None
    """Pixels of a picture, or of a frame."""
    max_pixels: int | None = None


@dataclass(frozen=True)
class Media:
    """One picture or clip of a prompt, in the order of its ``<image>`` and ``<video>`` placeholders.

    Its encoded bytes are ``data``, or the file ``path``; ``offset`` and ``size`` (bytes) cut a member out of a tar
    shard. ``frames``: which frames of a clip to show (indices), None for the reader's default.
    """

    kind: Literal["image", "video"]
    path: str | None = None
    offset: int | None = None
    size: int | None = None
    data: bytes | None = None
    frames: tuple[int, ...] | None = None
    show: Show | None = None
    """What its record says of how models see it."""
    pixels: int | None = field(default=None, compare=False)
    """Pixels of all its shown frames, from an index: an estimate of the work before decoding."""


@dataclass(frozen=True)
class ClipInfo:
    """What a clip is without its pixels: ``frames`` in all, of ``width`` x ``height`` pixels."""

    width: int
    height: int
    frames: int
    fps: float


@dataclass(frozen=True)
class Clip:
    """Decoded frames of a video: ``frames`` RGB, ``fps`` of the source, ``indices`` of the frames in it."""

    frames: Sequence[Image.Image]
    fps: float
    indices: Sequence[int]
    total: int
    """Frames of the source."""


class BadMediaError(ValueError):
    """A medium that cannot be read or is more than the limits allow; the message names it and says why."""


def describe(media: Media) -> str:
    """A name for messages: the file, the member's place in its shard, or that the bytes are inline."""
    if media.path is None:
        return f"inline {media.kind} of {len(media.data or b''):,} bytes"
    return media.path if media.offset is None else f"{media.path} at byte {media.offset}"


def read_bytes(media: Media, limits: Limits = LIMITS) -> bytes:
    """The encoded bytes. Raises ``BadMediaError`` where they are missing, cut off or too many.

    Only regular files are read: a pipe or a device would be waited for without end.
    """
    if media.data is not None:
        return _bounded(media, media.data, limits)
    if media.path is None:
        raise BadMediaError(f"{describe(media)} has neither bytes nor a path")
    start, size = media.offset or 0, media.size
    if start < 0 or (size is not None and size < 0):
        raise BadMediaError(f"{describe(media)}: offset {start} and size {size} are no place in a file")
    try:
        with open_file(media.path) as file:
            size = os.fstat(file.fileno()).st_size - start if size is None else size
            if size > limits.bytes:
                raise BadMediaError(f"{describe(media)} has {size:,} bytes; at most {limits.bytes:,} are read")
            file.seek(start)
            data = file.read(max(size, 0))
    except OSError as error:
        raise BadMediaError(f"{describe(media)} cannot be read: {error.strerror or error}") from None
    if len(data) != size:
        raise BadMediaError(f"{describe(media)} ends after {len(data):,} of {size:,} bytes")
    return _bounded(media, data, limits)


def open_image(media: Media, limits: Limits = LIMITS) -> Image.Image:
    """The picture as RGB, turned as its EXIF says; the first frame of an animated one. Raises ``BadMediaError``."""
    _expect(media, "image")
    data = read_bytes(media, limits)
    try:
        image, note = read_rgb(io.BytesIO(data), formats=IMAGE_FORMATS, max_pixels=limits.pixels)
    except BadImageError as error:
        why = str(error).replace("cannot identify image file the file", f"none of {', '.join(IMAGE_FORMATS)}")
        raise BadMediaError(f"{describe(media)}: {why}") from error
    if note:
        _once(media, logging.INFO, note)
    return image


def open_clip(
    media: Media,
    fps: float | None = None,
    count: int | None = None,
    frames: Sequence[int] | None = None,
    limits: Limits = LIMITS,
) -> Clip:
    """Decode the frames of a clip: at ``fps`` per second, ``count`` evenly spaced, or those of the list ``frames``.

    With none of the three, ``media.frames`` are shown, or all. A clip that has fewer frames than asked for is shown
    whole, each frame once. ``fps`` counts on a constant frame rate, the average of the file. decord decodes where it is
    installed and can, else PyAV; which one it was goes to the log ``mmrl.core.media``. Raises ``BadMediaError`` for the
    clip, ``ValueError`` for what was asked, ``UserError`` where no decoder is installed.
    """
    if sum(x is not None for x in (fps, count, frames)) > 1:
        raise ValueError("give one of fps, count and frames")
    if (fps is not None and not fps > 0) or (count is not None and count < 1) or (frames is not None and not frames):
        raise ValueError(f"fps={fps}, count={count}, frames={frames}: more than none is needed")
    if fps is None and count is None and frames is None:
        frames = media.frames
    wanted: Wanted = {"fps": fps, "count": count, "frames": None if frames is None else [int(i) for i in frames]}
    header, pixels = _decode(media, wanted, limits)
    size = (header["width"], header["height"])
    step = size[0] * size[1] * 3
    pictures = [Image.frombytes("RGB", size, pixels[i * step : (i + 1) * step]) for i in range(len(header["indices"]))]
    return Clip(pictures, header["fps"], tuple(header["indices"]), header["total"])


def evenly(frames: Sequence[T], count: int) -> list[T]:
    """``count`` of ``frames`` at even distances, first and last among them; all where there are no more."""
    if len(frames) <= count:
        return list(frames)
    return [frames[round(i * (len(frames) - 1) / max(1, count - 1))] for i in range(count)]


def probe_image(media: Media, limits: Limits = LIMITS, *, decode: bool = True) -> tuple[int, int]:
    """Width and height as ``open_image`` gives them; without ``decode``, as the file declares them.

    Raises ``BadMediaError``.
    """
    if decode:
        return open_image(media, limits).size
    _expect(media, "image")
    data = read_bytes(media, limits)
    try:
        with Image.open(watched(data), formats=IMAGE_FORMATS) as image:
            size = image.size
    except Exception as error:  # decoders raise anything
        raise BadMediaError(f"{describe(media)}: not a readable picture") from error
    if size[0] * size[1] > limits.pixels:
        raise BadMediaError(f"{describe(media)}: {size[0]} x {size[1]} pixels; at most {limits.pixels:,} are read")
    return size


def probe_clip(media: Media, limits: Limits = LIMITS, *, decode: bool = True) -> ClipInfo:
    """The size of a clip; up to 16 frames, the first and the last among them, are decoded to see that they can be.

    Without ``decode`` it is one frame. Raises as ``open_clip``.
    """
    header, _ = _decode(media, {"count": _PROBED if decode else 1, "probe": True}, limits)
    return ClipInfo(header["width"], header["height"], header["total"], header["fps"])


def _decode(media: Media, wanted: Wanted, limits: Limits) -> tuple[Header, bytes]:
    _expect(media, "video")
    installed = decoders()
    data = read_bytes(media, limits)
    reasons: list[str] = []
    for name in installed:
        request: Request = {
            "decoder": name,
            "wanted": wanted,
            "limits": {
                "pixels": limits.pixels,
                "seconds": limits.seconds,
                "frames": limits.frames,
                "total_pixels": limits.total_pixels,
            },
        }
        header: Header | Failure
        try:
            header, pixels = process_of(name).ask(request, data, limits.patience)
        except DecoderLostError as error:
            header, pixels = Failure(error=str(error), final=False), b""
        if "error" not in header:
            because = f" (decord cannot: {reasons[0]})" if reasons else "" if name == "decord" else " (no decord here)"
            level = logging.WARNING if reasons else logging.INFO
            _once(media, level, f"decoded with {'PyAV' if name == 'av' else name}{because}")
            return header, pixels
        if header["final"]:
            raise BadMediaError(f"{describe(media)} {header['error']}")
        reasons.append(header["error"])
    tried = "; ".join(f"{'PyAV' if n == 'av' else n}: {why}" for n, why in zip(installed, reasons, strict=True))
    raise BadMediaError(f"{describe(media)} cannot be decoded ({tried})")


def _expect(media: Media, kind: str) -> None:
    if media.kind != kind:
        raise BadMediaError(f"{describe(media)} is of kind {media.kind!r}, not {kind!r}")


def _bounded(media: Media, data: bytes, limits: Limits) -> bytes:
    if len(data) > limits.bytes:
        raise BadMediaError(f"{describe(media)} has {len(data):,} bytes; at most {limits.bytes:,} are read")
    if not data:
        raise BadMediaError(f"{describe(media)} is empty")
    return data


def _once(media: Media, level: int, text: str) -> None:
    """Log it once for each file, and for inline bytes once for each text. Numbers are ignored: decord adds the time."""
    key = f"{describe(media)} {re.sub('[0-9]+', '', text)}"
    if key not in _LOGGED and len(_LOGGED) < 1_000_000:
        _LOGGED.add(key)
        _log.log(level, "%s: %s", describe(media), text)
