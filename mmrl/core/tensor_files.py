"""Check the header of a safetensors file before anything is allocated for it.

The header says where each tensor lies. What the libraries do not look at is checked here: that it fits the file, that
shapes, sizes and places agree, and that shards of ``torch.distributed.checkpoint`` make up whole tensors.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Annotated, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as read
from torch import Tensor, nn

from mmrl.core.stored import BadFileError, blamed, faults, parsed
from mmrl.core.untrusted import open_file

_LARGEST_HEADER = 100_000_000
"""Bytes; the limit of safetensors itself."""
_MOST = 5_000_000
"""Values of a header: a tensor has some six."""
_SHARDS = "DCP_SHARDING_INFO"
_BITS = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
M = TypeVar("M", bound="nn.Module")
_Size = Annotated[int, Field(ge=0, lt=1 << 48)]


class Stored(BaseModel):
    """A tensor in a header."""

    model_config = ConfigDict(strict=True)
    dtype: str
    shape: Annotated[list[_Size], Field(max_length=16)]
    data_offsets: Annotated[list[_Size], Field(min_length=2, max_length=2)]


class _Shard(BaseModel):
    model_config = ConfigDict(strict=True)
    saved_offsets: Annotated[list[_Size], Field(max_length=16)]


_HEADER = TypeAdapter(dict[str, Stored])
_METADATA = TypeAdapter(dict[str, str])
_OFFSETS = TypeAdapter(dict[str, _Shard])


def header(path: Path) -> dict[str, Stored]:
    """The tensors of the file, whose header fits it. Raises ``BadFileError``."""
    return _read(path)[0]


def load(data: bytes, name: str) -> dict[str, Tensor]:
    """The tensors in the bytes of a safetensors file called ``name``. Raises ``BadFileError``."""
    _header(io.BytesIO(data), len(data), name)
    try:
        return read(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise BadFileError(f"{name} cannot be read ({error})") from error


def filled(make: Callable[[], M], tensors: Mapping[str, Tensor], name: str) -> M:
    """The module that ``make`` makes, with the weights ``tensors`` of the file ``name``; nothing is allocated before
    their shapes are known to fit. Draws no random numbers of the process. Raises ``BadFileError``."""
    with torch.random.fork_rng(devices=[]), blamed(Path(name)):
        with torch.device("meta"):
            asked = {key: of.shape for key, of in make().state_dict().items()}
        wrong = sorted(
            key for key in asked.keys() | tensors.keys() if asked.get(key) != getattr(tensors.get(key), "shape", 0)
        )
        if wrong:
            raise BadFileError(f"{name}: {wrong[0][:80]} is not as the settings beside it say")
        module = make()
        module.load_state_dict(dict(tensors))
    return module


def check_shards(files: Iterable[Path]) -> None:
    """Raises ``BadFileError`` for a header that does not fit its file, and where the tensors of several files do not
    make up whole ones."""
    chunks: dict[str, list[tuple[list[int], list[int], Path]]] = {}
    for path in files:
        tensors, metadata = _read(path)
        said = metadata.get(_SHARDS)
        places = {} if said is None else _offsets(said, path)
        for name, one in tensors.items():
            if said is not None and (name not in places or len(places[name]) != len(one.shape)):
                raise BadFileError(f"{path}: {_SHARDS} does not say where {name[:80]} begins")
            chunks.setdefault(name, []).append((places.get(name, [0] * len(one.shape)), one.shape, path))
    for name, found in chunks.items():
        _check_whole(name, found)


def _check_whole(name: str, chunks: list[tuple[list[int], list[int], Path]]) -> None:
    first, path = chunks[0][1], chunks[-1][2]
    alike = all(len(shape) == len(first) for _, shape, _ in chunks)
    whole = [max(at[i] + shape[i] for at, shape, _ in chunks) for i in range(len(first))] if alike else []
    volumes = sum(math.prod(shape) for _, shape, _ in chunks)
    apart = len({tuple(at) for at, shape, _ in chunks if math.prod(shape)}) == sum(
        bool(math.prod(c[1])) for c in chunks
    )
    if not alike or not apart or math.prod(whole) != volumes:
        raise BadFileError(f"{path}: the parts of {name[:80]} do not make up a whole tensor")


def _read(path: Path) -> tuple[dict[str, Stored], Mapping[str, str]]:
    try:
        with open_file(path) as file:
            return _header(file, os.fstat(file.fileno()).st_size, path)
    except OSError as error:
        raise BadFileError(f"{path} cannot be read ({error.strerror or error})") from error


def _header(file: IO[bytes], size: int, path: Path | str) -> tuple[dict[str, Stored], Mapping[str, str]]:
    """The tensors and the metadata of a file of ``size`` bytes, read from its beginning."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
        raise BadFileError(f"{path} is no safetensors file: its header would have {length:,} bytes")
    return _checked(parsed(file.read(length), f"the header of {path}", _MOST), size - 8 - length, path)


def _checked(found: object, size: int, path: Path | str) -> tuple[dict[str, Stored], Mapping[str, str]]:
    if not isinstance(found, dict):
        raise BadFileError(f"the header of {path} is no mapping")
    said = dict(found)
    try:
        metadata = _METADATA.validate_python(said.pop("__metadata__", None) or {})
        tensors = _HEADER.validate_python(said)
    except ValidationError as error:
        raise BadFileError(f"the header of {path} is not as safetensors writes it ({faults(error)})") from None
    end = 0
    for name, one in sorted(tensors.items(), key=lambda pair: pair[1].data_offsets):
        begin, stop = one.data_offsets
        bits = _BITS.get(one.dtype)
        fits = bits is not None and math.prod(one.shape) * bits == (stop - begin) * 8
        if begin != end or stop < begin or not fits:
            raise BadFileError(f"the header of {path}: {name[:80]} has a shape, a type and a place that do not agree")
        end = stop
    if end != size:
        raise BadFileError(f"the header of {path} describes {end:,} bytes of tensors, and the file has {size:,}")
    return tensors, metadata


def _offsets(text: str, path: Path) -> dict[str, list[int]]:
    try:
        found = _OFFSETS.validate_python(parsed(text, f"{_SHARDS} of {path}"))
    except ValidationError as error:
        raise BadFileError(f"{_SHARDS} of {path} is not as torch writes it ({faults(error)})") from None
    return {name: one.saved_offsets for name, one in found.items()}
