"""Read the members of a tar file by offset, without trusting its contents or writing to disk."""

from __future__ import annotations

import contextlib
import os
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from mmrl.core.media import LIMITS
from mmrl.core.untrusted import RefusedFileError, open_file
from mmrl.data.records import BadRecord

_MAX_HEADER = 1 << 16
"""Bytes read at once; only headers are read here. An extended header that asks for more is hostile."""
_CHUNK = 1 << 20
_MAX_FAULTS = 1000
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


@dataclass(frozen=True)
class Member:
    """A member: its name, and where its ``size`` bytes begin. ``why`` is set where it must not be used."""

    name: str
    offset: int
    size: int
    why: str | None = None


def read_members(path: Path) -> tuple[list[Member], list[BadRecord]]:
    """The members of the tar file at ``path`` in order (folders left out), and what is wrong with the file as a whole.

    Where the file is damaged, reading continues at the next header. Raises ``OSError``.
    """
    found: list[Member] = []
    try:
        file = open_file(path)
    except RefusedFileError as error:
        return [], [BadRecord(path.name, error.strerror or "")]
    with file:
        faults = _walk(file, os.fstat(file.fileno()).st_size, found)
    return found, [BadRecord(path.name, why) for why in faults]


def _walk(file: IO[bytes], size: int, found: list[Member]) -> list[str]:
    """Append the members to ``found``; returns what is wrong with the file."""
    faults: list[str] = []
    beside: list[int] = []
    start: int | None = 0
    while start is not None:
        at, why = _stretch(file, start, size, found)
        if why is None:
            break
        start = _next_header(file, at + 512)
        faults.append(why if start is None else f"{why}; read on from byte {start:,}")
        beside.append(len(found))
        if len(faults) == _MAX_FAULTS:
            faults.append("has no end of faults; the rest of it was not read")
            break
    for i in {i for place in beside for i in (place - 1, place) if 0 <= i < len(found) and found[i].why is None}:
        found[i] = replace(found[i], why="is next to damage in the shard: other members of its sample may be lost")
    return faults


def _stretch(file: IO[bytes], start: int, size: int, found: list[Member]) -> tuple[int, str | None]:
    """Append the members from byte ``start`` to the first one that is damaged.

    Returns its byte, and what is wrong there; None where that is the end of the archive.
    """
    at, before = start, len(found)
    file.seek(start)
    try:
        with tarfile.open(fileobj=_Bounded(file), mode="r:", errorlevel=2) as archive:  # type: ignore[call-overload]
            while (info := archive.next()) is not None:
                if info.offset < at or info.size < 0:
                    return at, f"is damaged at byte {at:,}: a header points backwards"
                at, end = info.offset, info.offset_data + info.size
                if end > size:
                    found.append(Member(info.name, info.offset_data, info.size, "ends after the end of the shard"))
                    return at, f"is cut off: {info.name!r} ends at byte {end:,} of {size:,}"
                if not info.isdir():
                    found.append(Member(info.name, info.offset_data, info.size, _fault(info)))
                archive.members = []  # type: ignore[assignment]  # else it keeps every header
                at = archive.offset
    except Exception as error:  # tarfile lets through what its parsing raises: struct.error, RecursionError, KeyError
        at = max(at, file.tell() - 512)  # not headers again that were read: a chain of them would cost its square
        what = str(error) or type(error).__name__
        if before == len(found) == 0:
            return at, f"is no tar file ({what})"
        return at, f"is damaged after byte {at:,} ({what})"
    return _end(file, at, size)


def _end(file: IO[bytes], at: int, size: int) -> tuple[int, str | None]:
    """tarfile takes anything it does not understand for the end. The real one is zeros, up to the end of the file."""
    if at >= size:
        return at, "ends without an end mark, so it may have been cut off"
    file.seek(at)
    while block := file.read(_CHUNK):
        if zeros := len(block) - len(block.lstrip(b"\0")):
            at += zeros
        if zeros < len(block):
            return at - at % 512 - 512, f"is damaged: the bytes at {at:,} of {size:,} are not a header"
    return at, None


def _next_header(file: IO[bytes], at: int) -> int | None:
    """Where the next block begins, from byte ``at`` on, that is a header by its magic word and checksum."""
    at += -at % 512
    file.seek(at)
    while block := file.read(_CHUNK):
        place = block.find(b"ustar", 257)
        while place >= 0:
            begin = place - 257
            if begin % 512 == 0:
                with contextlib.suppress(tarfile.HeaderError):
                    tarfile.TarInfo.frombuf(block[begin : begin + 512], "utf-8", "surrogateescape")
                    return at + begin
            place = block.find(b"ustar", place + 1)
        at += len(block)
    return None


def _fault(info: tarfile.TarInfo) -> str | None:
    """Why a member must not be used."""
    name = info.name
    if name.startswith("/") or ".." in name.split("/") or "\\" in name:
        return "its name leaves the archive"
    if any(ord(c) < 32 or "\ud800" <= c <= "\udfff" for c in name):
        return "its name is no readable text"
    if info.type in _KINDS or info.issparse():
        return f"is {_KINDS.get(info.type, 'a sparse file')}"
    if not info.isreg():
        return f"is a member of the unknown type {info.type!r}"
    if info.size > LIMITS.bytes:
        return f"has {info.size:,} bytes; at most {LIMITS.bytes:,} are read"
    return None


class _Bounded:
    """A file whose reads are bounded, which is what bounds tarfile's memory: it believes an extended header's size."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, n: int = -1) -> bytes:
        if not 0 <= n <= _MAX_HEADER:
            raise ValueError(f"a header of {n:,} bytes")
        return self._file.read(n)
