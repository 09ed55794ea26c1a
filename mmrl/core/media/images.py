"""Convert pictures from outside (a folder, the network) to RGB for rewards. Imports no torch."""

from __future__ import annotations

import io
import re
import struct
import time
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from PIL import ExifTags, Image, ImageSequence

if TYPE_CHECKING:
    import torch

MAX_PIXELS = 4096 * 4096
DECODE_S = 20.0
"""Seconds of computing that a picture may take to decode, however busy the machine is; one of ``MAX_PIXELS`` takes
about one."""
MAX_SCANS = 64
"""Of a JPEG. Each goes over the whole picture, however few bytes it has; encoders write about ten."""
MAX_PIECES = 2**16
"""Strips or tiles of a TIFF."""
MAX_MOVING_PIXELS = 16 * MAX_PIXELS
"""Of all frames of a picture that moves: 640 of 832 x 480, in 0.8 GB."""
_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])")
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
# Pillow's own warnings on size and metadata, of which only the orientation counts: both are judged here. Set once,
# since catch_warnings is not thread-safe.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")  # it reads the EXIF of every format
warnings.filterwarnings("ignore", "Possibly corrupt EXIF MakerNote")
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes each orientation of EXIF."""
_ALPHA = ("RGBA", "LA", "PA", "La", "RGBa")


class BadImageError(ValueError):
    """A picture that cannot be read or has no single meaning in RGB; the message says why."""


def png_bytes(image: Image.Image, **options: Any) -> bytes:
    """``image`` as a PNG file; ``options`` are Pillow's."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def read_rgb(
    source: Path | IO[bytes], *, formats: tuple[str, ...] | None = None, max_pixels: int = MAX_PIXELS
) -> tuple[Image.Image, str | None]:
    """Read a picture as RGB, and say what had to be changed for that (None: nothing).

    ``formats`` are the decoders allowed (None: all). The size and the work are checked before a pixel is decoded,
    which then has a deadline. Raises ``BadImageError``.
    """
    try:
        file = watched(source.read_bytes() if isinstance(source, Path) else source.read())
        with Image.open(file, formats=formats) as image:
            pixels = image.width * image.height
            if pixels > max_pixels:
                raise BadImageError(f"{image.width} x {image.height} pixels; at most {max_pixels:,} are read")
            frames = getattr(image, "n_frames", 1)
            image.load()
            turned, note = upright_rgb(image)
    except BadImageError:
        raise
    except Exception as error:  # decoders raise anything: OSError, SyntaxError, struct.error, ValueError, KeyError
        raise BadImageError(f"not a readable picture: {str(error).replace(str(source), 'the file')}") from error
    notes = [f"first of {frames} frames"] if frames > 1 else []
    return turned, ", ".join([*filter(None, (note,)), *notes]) or None


def upright_rgb(image: Image.Image) -> tuple[Image.Image, str | None]:
    """A loaded picture as RGB, turned as its EXIF says, and what had to be changed for that.

    The orientation is read before the conversion, which loses it in some modes. Pillow has turned a TIFF already when
    it was loaded.
    """
    turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    rgb, note = _to_rgb(image)
    if turn is None:
        return rgb, note
    turned = rgb.transpose(turn)
    turned.info.pop("exif", None)
    return turned, ", ".join(filter(None, (note, "turned as its EXIF says")))


class _Watched(io.BytesIO):
    """A file in memory that the thread which made it cannot read after its deadline.

    Decoders read in small pieces wherever a file can make them work for long, apart from what ``watched`` refuses.
    """

    until = float("inf")

    def __repr__(self) -> str:
        return "the file"  # Pillow names it so in its errors

    def read(self, size: int | None = -1, /) -> bytes:
        if time.thread_time() > self.until:
            raise BadImageError(f"not decoded within {DECODE_S:g} s of computing")
        return super().read(size)


def watched(data: bytes) -> IO[bytes]:
    """A file to decode ``data`` from. Raises ``BadImageError`` for little data that would make much work."""
    if data[:2] == b"\xff\xd8" and data.count(b"\xff\xda") > MAX_SCANS and (scans := _scans(data)) > MAX_SCANS:
        raise BadImageError(f"a JPEG of {scans} scans; at most {MAX_SCANS} are read; save it anew")
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+") and (pieces := _pieces(data)) > MAX_PIECES:
        raise BadImageError(f"a TIFF of {pieces} strips or tiles; at most {MAX_PIECES:,} are read; save it anew")
    file = _Watched(data)
    file.until = time.thread_time() + DECODE_S
    return file


def _scans(data: bytes) -> int:
    """The scans of a JPEG: thumbnails and profiles, which lie in segments, do not count."""
    scans, at = 0, 2
    while (found := _MARKER.search(data, at)) and found[1] != b"\xd9":
        scans += found[1] == b"\xda"
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")
    return scans


def _pieces(data: bytes) -> int:
    """The most strips or tiles that the first directory of a TIFF names."""
    order, big = "<" if data[:1] == b"I" else ">", b"+" in data[2:4]
    offset, number, entry = ("Q", "Q", "HHQ8x") if big else ("I", "H", "HHI4x")
    try:
        (start,) = struct.unpack_from(order + offset, data, 8 if big else 4)
        (entries,) = struct.unpack_from(order + number, data, start)
        first, size = start + struct.calcsize(order + number), struct.calcsize(order + entry)
        found = (struct.unpack_from(order + entry, data, first + i * size) for i in range(min(entries, 2**16)))
        return max((count for tag, _, count in found if tag in (273, 279, 324, 325)), default=0)
    except struct.error:  # cut off: Pillow says so
        return 0


def to_tensor(image: Image.Image) -> torch.Tensor:
    """An RGB picture as float32 ``[3, H, W]`` in [0, 1]."""
    import numpy as np
    import torch

    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255.0).permute(2, 0, 1).contiguous()


def _to_rgb(image: Image.Image) -> tuple[Image.Image, str | None]:
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image.copy(), None
    if mode in _SIXTEEN_BIT or mode == "I":
        return _from_wide(image)
    if mode == "F":
        raise BadImageError("floating-point pixels have no fixed range; save it as 8-bit RGB")
    if mode in _ALPHA or "transparency" in image.info:
        over = image.convert("RGBA")
        white = Image.new("RGBA", over.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, over).convert("RGB"), f"{mode} laid on white"
    return image.convert("RGB"), f"converted from {mode}"


def _from_wide(image: Image.Image) -> tuple[Image.Image, str]:
    """16-bit grey (which Pillow's own conversion would clip at 255) by its high byte."""
    import numpy as np

    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 0xFFFF:
        raise BadImageError("32-bit integer pixels have no fixed range; save it as 8-bit RGB")
    return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB"), "converted from 16-bit grey"


def frames_of(image: Image.Image) -> list[Image.Image]:
    """The frames of an open picture that moves, RGB. Raises ``BadImageError`` where they are too many to be kept."""
    frames, pixels = list[Image.Image](), 0
    for frame in ImageSequence.Iterator(image):
        pixels += frame.width * frame.height
        if pixels > MAX_MOVING_PIXELS:
            raise BadImageError(f"its frames have more than {MAX_MOVING_PIXELS:,} pixels; shorten it")
        frames.append(frame.convert("RGB"))
    return frames
