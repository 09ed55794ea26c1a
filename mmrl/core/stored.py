"""Read the files that a run or another folder of mmrl holds: regular, bounded, and as their schema says.

Such a folder may come from somebody else. What is read is a regular file of at most so many bytes; its JSON is not
deep, its numbers are finite and its integers fit 64 bits. A file that does not fit is a ``BadFileError``, which names
the file and the key. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from mmrl.core.errors import UserError, plain
from mmrl.core.json_types import Json, MutableJson
from mmrl.core.untrusted import MAX_VALUES, parse_json, read_file

LARGEST = 64 << 20
"""Bytes of one JSON file."""
LARGEST_LINES = 1 << 30
"""Bytes of a file of JSON lines."""
_SHOWN = 3
"""Largest number of faults of a file in a message."""
M = TypeVar("M")
Size = Annotated[int, Field(ge=1, le=1 << 20, strict=True)]
"""A width or a number of tokens in a stored model's settings."""
Layers = Annotated[int, Field(ge=1, le=256, strict=True)]
"""The number of layers or models in a stored model's settings."""
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
"""A finite number."""
Text = Annotated[str, Field(strict=True)]


class BadFileError(UserError, ValueError):
    """A stored file is not as mmrl writes it; the message names the file, the place in it, and what to do."""


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """The content of a regular file of at most ``most`` bytes.

    Raises ``FileNotFoundError`` where there is none, and ``BadFileError`` for a pipe, a device, a folder, a larger file
    and one that cannot be read.
    """
    try:
        return read_file(path, most=most)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadFileError(
            f"{path} cannot be read ({error.strerror or error}); remove it, or put the file back from a copy"
        ) from error


def read_text(path: Path, most: int = LARGEST) -> str:
    """The text of a regular file in UTF-8. Raises as ``read_bytes``."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadFileError(f"{path} is not text in UTF-8 (byte {error.start}); put it back from a copy") from None


def read_json(path: Path, most: int = LARGEST) -> Json:
    """The value in a JSON file. Raises as ``read_bytes``."""
    return parsed(read_bytes(path, most), str(path))


def read_object(path: Path, most: int = LARGEST) -> dict[str, Any]:
    """The mapping in a JSON file. Raises as ``read_bytes``."""
    found = read_json(path, most)
    if not isinstance(found, dict):
        raise BadFileError(f"{path} holds {_kind(found)}, where mmrl writes a mapping; put it back from a copy")
    return found


def object_if_whole(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty where there is no file, or a damaged one."""
    try:
        return read_object(path)
    except (OSError, BadFileError):
        return {}


def read_as(kind: type[M], path: Path, most: int = LARGEST) -> M:
    """The content of a JSON file, which must fit the schema ``kind``. Raises as ``read_bytes``."""
    return fitted(kind, read_object(path, most), str(path))


def fitted(kind: type[M], found: Json, name: str) -> M:
    """``found``, read from the file ``name``, as the schema ``kind``. Raises ``BadFileError``."""
    try:
        return TypeAdapter(kind).validate_python(found)
    except ValidationError as error:
        raise BadFileError(f"{name} is not one that mmrl writes ({faults(error)}); put it back from a copy") from None


def faults(error: ValidationError) -> str:
    """What does not fit a schema: the keys and why, the first of them."""
    found = error.errors(include_url=False, include_input=False)
    named = [f"{'.'.join(map(str, e['loc'])) or 'all of it'}: {e['msg']}" for e in found[:_SHOWN]]
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return plain("; ".join(named) + more)


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not empty, and their numbers; none where there is no file.

    Raises ``BadFileError``.
    """
    try:
        content = read_bytes(path, LARGEST_LINES)
    except FileNotFoundError:
        return
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            yield number, line


def parsed(data: bytes | str, name: str, values: int = MAX_VALUES) -> MutableJson:
    """The JSON value of ``data``, which stands in ``name`` and has at most so many ``values``. Raises
    ``BadFileError``."""
    try:
        return parse_json(data, values, strict=True)
    except ValueError as error:
        raise BadFileError(f"{name} cannot be read: it {plain(str(error), 200)}; put it back from a copy") from None


@contextmanager
def blamed(file: Path, key: str = "") -> Generator[None]:
    """What goes wrong inside, with values of ``file``, is a ``BadFileError`` that names the file and the ``key``."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        where = f", {key}," if key else ""
        why = plain(f"{type(error).__name__}: {error}".splitlines()[0], 300)
        raise BadFileError(f"{file}{where} is not as mmrl writes it ({why}); put it back from a copy") from error


def _kind(value: Json) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
