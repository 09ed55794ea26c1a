"""The folder of a small model: a JSON file that describes it, and ``model.safetensors`` beside it; none is a pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

from safetensors.torch import save
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.json_types import JsonObject
from mmrl.core.stored import LARGEST, LARGEST_LINES, BadFileError, fitted, parsed, read_bytes
from mmrl.core.tensor_files import load
from mmrl.core.untrusted import MAX_VALUES

WEIGHTS = "model.safetensors"
M = TypeVar("M")


def write_model(file: Path, said: JsonObject, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` beside ``file``, and ``said`` into it, with the SHA-256 of the tensors' file as ``weights``."""
    weights = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    write_atomic(file.with_name(WEIGHTS), weights)
    said = {**said, "weights": hashlib.sha256(weights).hexdigest()}
    write_atomic(file, json.dumps(said, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_said(file: Path, kind: type[M], formats: Collection[int], values: int = MAX_VALUES, most: int = LARGEST) -> M:
    """What ``file`` says, as the schema ``kind``; it has one of ``formats``, at most so many ``values`` and
    ``most`` bytes.

    Raises ``FileNotFoundError``, ``BadFileError`` for another content, and ``UserError`` for another format.
    """
    found = parsed(read_bytes(file, most), str(file), values)
    if not isinstance(found, dict):
        raise BadFileError(f"{file} is no mapping")
    if found.get("format") not in formats:
        known = " or ".join(map(str, formats))
        raise UserError(f"{file} has format {found.get('format')}, and this version reads {known}")
    return fitted(kind, found, str(file))


def read_weights(file: Path, digest: str | None = None) -> dict[str, Tensor]:
    """The tensors beside ``file``. Raises ``ValueError``, also where their file has not the SHA-256 ``digest``."""
    data = read_bytes(file.with_name(WEIGHTS), LARGEST_LINES)
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"its sha256 is not that of {file.name}")
    return load(data, str(file.with_name(WEIGHTS)))
