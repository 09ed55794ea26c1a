"""Decode clips in a separate process, so that a hostile file can crash or hang only that process.

Run as a script by ``mmrl.core.media.decoding``, with the number of an inherited pipe. Imports nothing of mmrl. A
message is a JSON header, then bytes: the encoded clip on the way in, RGB frames ``[n, height, width, 3]`` uint8 on the
way out.

The encoded bytes are always passed in memory, and their first bytes must be those of a video container: else FFmpeg
would follow a playlist named ``.mp4`` to other files and to the network.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypedDict

MEMORY_BYTES = 8 << 30
"""The most address space of the process: the system refuses it more."""
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip", b"pnot")


class Wanted(TypedDict, total=False):
    """The frames to decode: see ``select``. ``probe``: their pixels are not sent."""

    frames: list[int] | None
    count: int | None
    fps: float | None
    probe: bool


class Bounds(TypedDict):
    """The limits of a clip, of ``mmrl.core.media.Limits``."""

    pixels: int
    seconds: float
    frames: int
    total_pixels: int


class Header(TypedDict):
    """The header of a decoded clip."""

    width: int
    height: int
    fps: float
    total: int
    indices: list[int]


class Failure(TypedDict):
    """The header of a reply without frames. ``final``: no other decoder is tried."""

    error: str
    final: bool


class Request(TypedDict):
    """The header of a request."""

    decoder: str
    wanted: Wanted
    limits: Bounds


class FinalError(ValueError):
    """The clip is bad for every decoder: no other one is tried."""


def container_of(data: bytes) -> str | None:
    """FFmpeg's name of the video container of ``data``; None where it is none."""
    if data[4:8] in _BOXES and data[:1] == b"\0":
        return "mp4"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    return "avi" if data[:4] == b"RIFF" and data[8:12] == b"AVI " else None


def select(total: int, source_fps: float, wanted: Wanted) -> list[int]:
    """Indices of the frames to show, ascending except for an explicit list.

    ``wanted`` has at most one of ``frames`` (a list of indices), ``count`` (that many, evenly spaced from the first to
    the last) and ``fps`` (the frame on screen at 0, 1/fps, 2/fps ... seconds); with none of them all frames. More than
    there are means all of them, none twice. Raises ``FinalError`` for an index that the clip does not have.
    """
    frames, count, rate = wanted.get("frames"), wanted.get("count"), wanted.get("fps")
    if frames is not None:
        missing = [i for i in frames if not 0 <= i < total]
        if missing:
            raise FinalError(f"has {total} frames, numbered from 0; there is no frame {missing[0]}")
        return list(frames)
    if count is not None:
        n = min(count, total)
        return [(2 * i * (total - 1) + n - 1) // (2 * n - 2) for i in range(n)] if n > 1 else [(total - 1) // 2]
    if rate is not None and source_fps > 0:
        step = source_fps / rate
        if step > 1:
            return [min(total - 1, int(i * step + 1e-6)) for i in range(max(1, math.ceil(total / step - 1e-6)))]
    return list(range(total))


def check(total: int, fps: float, width: int, height: int, chosen: int, limits: Bounds) -> None:
    """Raise ``FinalError`` where the clip is empty or larger than ``limits`` allow."""
    if total < 1 or width < 1 or height < 1:
        raise FinalError("has no frames")
    if width * height > limits["pixels"]:
        raise FinalError(f"has frames of {width} x {height} pixels; at most {limits['pixels']:,} are read")
    if fps > 0 and total / fps > limits["seconds"]:
        raise FinalError(f"lasts {total / fps:.0f} seconds; at most {limits['seconds']:g} are read")
    if chosen > limits["frames"]:
        raise FinalError(f"{chosen} frames were asked for; at most {limits['frames']} are read (set fps or count)")
    if chosen * width * height > limits["total_pixels"]:
        raise FinalError(
            f"{chosen} frames of {width} x {height} make {chosen * width * height:,} pixels; at most "
            f"{limits['total_pixels']:,} are read (set fps or count)"
        )


def with_decord(data: bytes, wanted: Wanted, limits: Bounds) -> tuple[Header, bytes]:
    """Decode with decord."""
    import decord  # pyright: ignore[reportMissingImports]

    decord.logging.set_level(decord.logging.QUIET)
    reader = decord.VideoReader(io.BytesIO(data), num_threads=1)
    total, fps = len(reader), float(reader.get_avg_fps())
    height, width, channels = reader[0].shape
    if channels != 3:  # at a few widths (48) decord takes the padding of a row for a fourth channel
        raise ValueError(f"takes frames {width} pixels wide for {channels} channels")
    chosen = select(total, fps, wanted)
    check(total, fps, width, height, len(chosen), limits)
    parts = []
    for start in range(0, len(chosen), 32):  # in parts, since decord and its copy hold the frames twice
        batch = reader.get_batch(chosen[start : start + 32]).asnumpy()
        parts.append(b"" if wanted.get("probe") else batch.tobytes())
    return _header(width, height, fps, total, chosen), b"".join(parts)


def with_av(data: bytes, wanted: Wanted, limits: Bounds) -> tuple[Header, bytes]:
    """Decode with PyAV."""
    import av  # pyright: ignore[reportMissingImports]
    import numpy as np

    av.logging.set_level(None)
    name = container_of(data)
    with av.open(io.BytesIO(data), format=name, options={"protocol_whitelist": "pipe"}) as container:
        if not container.streams.video:
            raise FinalError("has no frames: there is no picture track in it")
        stream = container.streams.video[0]
        total = sum(1 for p in container.demux(stream) if p.size and not p.is_discard)
        if stream.frames > total:
            raise FinalError(f"is cut off: it declares {stream.frames} frames and holds {total}")
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        check(total, fps, stream.width, stream.height, 0, limits)
    chosen = select(total, fps, wanted)
    check(total, fps, stream.width, stream.height, len(chosen), limits)
    found: dict[int, bytes] = {}
    size = None
    for i, frame in _frames(av, data, name, set(chosen)):
        picture = np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90)))
        if size not in (None, picture.shape[:2]):
            raise FinalError("changes its size from frame to frame")
        size = picture.shape[:2]
        found[i] = b"" if wanted.get("probe") else picture.tobytes()
    missing = [i for i in chosen if i not in found]
    if missing or size is None:
        raise FinalError(f"declares {total} frames; frame {missing[0]} cannot be decoded")
    return _header(size[1], size[0], fps, total, chosen), b"".join(found[i] for i in chosen)


def _frames(av: Any, data: bytes, name: str | None, chosen: set[int]) -> Iterator[tuple[int, Any]]:
    """The frames of ``chosen`` with their indices, decoded in order up to the last of them."""
    with av.open(io.BytesIO(data), format=name, options={"protocol_whitelist": "pipe"}) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for i, frame in enumerate(container.decode(stream)):
            if i in chosen:
                if frame.is_corrupt:
                    raise ValueError(f"frame {i} is damaged")
                yield i, frame
            if i >= max(chosen):
                return


def _header(width: int, height: int, fps: float, total: int, chosen: Sequence[int]) -> Header:
    return {
        "width": width,
        "height": height,
        "fps": fps,
        "total": total,
        "indices": [int(i) for i in chosen],
    }


def answer(request: Request, data: bytes) -> tuple[Header | Failure, bytes]:
    """The reply to one request. Never raises."""
    try:
        if container_of(data) is None:
            raise FinalError("is neither MP4, Matroska (WebM) nor AVI")
        decode = {"decord": with_decord, "av": with_av}[request["decoder"]]
        return decode(data, request["wanted"], request["limits"])
    except Exception as error:  # decoders raise anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = lines[0][:300] if lines else type(error).__name__
        return {"error": why, "final": isinstance(error, FinalError)}, b""


def main(pipe: int) -> None:
    """Answer requests until the other side closes the pipe."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # a stricter limit of the user's stays
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    connection = Connection(pipe)
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # hides the decoders' own messages; errors are in the reply
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = json.loads(connection.recv_bytes())
            header, pixels = answer(request, connection.recv_bytes())
            connection.send_bytes(json.dumps(header).encode())
            connection.send_bytes(pixels)


if __name__ == "__main__":
    main(int(sys.argv[1]))
