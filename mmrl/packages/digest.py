"""A digest of the tensors in a safetensors file: of names, dtypes, shapes and bytes, in the order of the names.

It does not depend on how a version of safetensors or transformers orders them or what else it puts into the header.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mmrl.untrusted import parse_json

_CHUNK = 1 << 22
_MOST = 5_000_000
"""Values of a header: a tensor has some six."""


def digest_of(file: Path) -> str:
    """The SHA-256, in hexadecimal digits. Raises ``OSError``, and ``ValueError`` for what is no such file."""
    found = hashlib.sha256()
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > 100_000_000:
            raise ValueError(f"{file} is no safetensors file")
        header: Any = parse_json(stream.read(length), _MOST)
        if not isinstance(header, dict):
            raise ValueError(f"{file} is no safetensors file")
        header.pop("__metadata__", None)
        for name in sorted(header):
            entry = header[name]
            begin, end = entry["data_offsets"]
            found.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
            stream.seek(8 + length + begin)
            left = end - begin
            while left:
                piece = stream.read(min(_CHUNK, left))
                if not piece:
                    raise ValueError(f"{file} ends within the tensor {name}")
                found.update(piece)
                left -= len(piece)
    return found.hexdigest()
