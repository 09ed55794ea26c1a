"""The lines of a file of any size, with bounded memory: ends are those of Unix, Windows and the old Macintosh."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO

from mmrl.core.errors import UserError
from mmrl.core.untrusted import printable
from mmrl.data.limits import LIMITS

_CHUNK = 1 << 20
_END = re.compile(rb"\r\n|\n|\r")


def split_lines(file: IO[bytes], most: int) -> Iterator[tuple[bytes, int]]:
    """Each line with its end, and its bytes. Of a line of more than ``most`` bytes only about as many are given. Raises
    ``UserError`` where more than ``LIMITS.blank`` lines without a word follow one another."""
    parts: list[bytes] = []
    size = held = blank = 0
    kept = b""  # a \r whose \n may follow
    while True:
        read = file.read(_CHUNK)
        data = kept + read
        kept = b"\r" if read and data.endswith(b"\r") else b""
        data = data.removesuffix(kept) if kept else data
        start = 0
        for end in _END.finditer(data):
            piece = data[start : end.end()]
            start = end.end()
            blank = blank + 1 if piece.isspace() and not parts else 0
            if blank > LIMITS.blank:
                raise UserError(
                    f"path: {printable(str(file.name))} has more than {LIMITS.blank:,} blank lines behind one another; "
                    "take them out"
                )
            yield (b"".join([*parts, piece]) if parts else piece, size + len(piece))
            parts, size, held = [], 0, 0
        rest = data[start:]
        if rest:
            size += len(rest)
            if held <= most:
                parts.append(rest)
                held += len(rest)
        if not read:
            break
    if size:
        yield b"".join(parts), size
