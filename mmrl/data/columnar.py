"""What Parquet and Arrow files hold once unpacked, found out in small pieces before anything reads them as a whole.

A column of equal values takes a few bytes in a file and any amount of memory. Parquet is read here with its
dictionaries kept, so that a value which is repeated is held once; Arrow is mapped and validated, since a wrong offset
in it would let a reader reach outside the file. The result is kept in the cache until the file changes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.core.json_types import JsonObject
from mmrl.core.untrusted import MAX_DEPTH, MAX_VALUES, open_file, printable
from mmrl.data import store
from mmrl.data.limits import LIMITS

if TYPE_CHECKING:
    import pyarrow as pa

_VERSION = 1
ROWS = 64
"""Rows of Parquet that are unpacked at once."""
_DICTIONARY, _BATCH = 2, 3
"""Kinds of Arrow messages."""
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}


def check_parquet(file: Path, root: Path | None = None) -> int:
    """The bytes of the largest ``ROWS`` rows of a Parquet file. Raises ``ValueError`` for one that is no Parquet or
    unpacks to too much, ``OSError`` for one that must not be opened."""
    return _known(file, _look_at_parquet, root)


def check_arrow(file: Path, root: Path) -> int:
    """Refuse an Arrow file that is outside ``root``, or has more rows, columns or bytes than the limits allow."""
    return _known(file, _look_at_arrow, root)


def check_row(row: pa.Table) -> None:
    """Raise ``ValueError`` for a row that is too large to make a record of."""
    size, media = row.nbytes, sum(map(_binary, row.itercolumns()))
    if size > LIMITS.row:
        raise ValueError(f"has {size:,} bytes; at most {LIMITS.row:,} are read")
    if size - media > LIMITS.record:
        raise ValueError(f"has {size - media:,} bytes beside pictures and clips; at most {LIMITS.record:,} are read")
    nested = [chunk for column in row.columns if column.type.num_fields for chunk in column.chunks]
    if sum(map(_values, nested)) > MAX_VALUES:
        raise ValueError(f"has more than {MAX_VALUES:,} values")


def _known(file: Path, look: Callable[[str, int], int], root: Path | None) -> int:
    """The largest rows, from an earlier look at the same file or from a new one."""
    with open_file(file, root=root) as opened:
        status = os.fstat(opened.fileno())
        stamp: JsonObject = {"version": _VERSION, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        home = file.with_name(f".{file.name}.mmrl-unpacked.json")
        found = store.load(home, stamp, beside=False)
        if found is None:
            try:
                largest, why = look(os.path.realpath(file), status.st_size), None
            except ValueError as error:
                largest, why = 0, printable(str(error))
            store.save(home, stamp, found := {"largest": largest, "why": why}, beside=False)
    largest, why = found.get("largest"), found.get("why")
    if isinstance(why, str) or not isinstance(largest, int):
        raise ValueError(f"{printable(str(file))} {why}")
    return largest


def _look_at_parquet(path: str, size: int) -> int:
    """Raises ``ValueError``, which goes on after the file's name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            _check_shape(file.schema_arrow, file.metadata.num_rows)
            most = max(LIMITS.unpacked, LIMITS.ratio * size)
            texts = _texts(file.metadata, most)
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False, read_dictionary=texts) as file:
            return _unpacked(file, most)
    except (pa.ArrowException, OSError, MemoryError, OverflowError) as error:
        raise ValueError(f"cannot be read as Parquet ({error})") from None


def _texts(metadata: Any, most: int) -> list[str]:
    """The columns of texts and bytes. Raises ``ValueError`` where the pieces of all columns say that they unpack to
    more than ``most`` bytes."""
    total, texts = 0, dict[str, None]()
    for group in range(metadata.num_row_groups):
        for n in range(metadata.num_columns):
            piece = metadata.row_group(group).column(n)
            if piece.physical_type == "BYTE_ARRAY":
                texts[piece.path_in_schema] = None
            total += max(piece.total_uncompressed_size, piece.num_values * _WIDTHS.get(piece.physical_type, 4))
    _check_total(total, most)
    return list(texts)


def _unpacked(file: Any, most: int) -> int:
    """Unpack all rows; returns the bytes of the largest ``ROWS`` of them. Raises ``ValueError``."""
    total = rows = largest = 0
    for batch in file.iter_batches(batch_size=ROWS, use_threads=False):
        size = batch.nbytes + sum(map(_expanded, batch.columns))
        total, rows, largest = total + size, rows + batch.num_rows, max(largest, size)
        _check_total(total, most)
        _check_rows(rows)
    return largest


def _expanded(column: Any) -> int:
    """The bytes of the texts in a column whose dictionaries are kept."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        lengths = pc.call_function("binary_length", [column.dictionary])
        return pc.call_function("sum", [lengths.take(column.indices)]).as_py() or 0
    if pa.types.is_struct(column.type):
        return sum(map(_expanded, column.flatten()))
    return _expanded(column.flatten()) if column.type.num_fields and hasattr(column, "flatten") else 0


def _look_at_arrow(path: str, size: int) -> int:
    """Raises ``ValueError``, which goes on after the file's name."""
    import pyarrow as pa

    try:
        with pa.memory_map(path) as source:
            if source.read(6) == b"ARROW1":
                raise ValueError("is an Arrow file with a footer, not a stream; save it with save_to_disk")
            source.seek(0)
            messages = pa.ipc.MessageReader.open_stream(source)
            if any(_compressed(message.metadata.to_pybytes()) for message in messages):
                raise ValueError("is packed; save it with save_to_disk, which packs nothing")
            source.seek(0)
            with pa.ipc.open_stream(source) as batches:
                _check_shape(batches.schema, 0)
                rows = 0
                for batch in batches:
                    batch.validate(full=True)
                    rows += batch.num_rows
                    _check_rows(rows)
        return 0
    except (pa.ArrowException, OSError, MemoryError, OverflowError, struct.error, IndexError) as error:
        raise ValueError(f"cannot be read as Arrow ({error})") from None


def _compressed(metadata: bytes) -> bool:
    """Whether the buffers of an Arrow message are packed, which its flatbuffer says: the field ``compression`` of its
    record batch."""

    def field(table: int, number: int) -> int | None:
        vtable = table - struct.unpack_from("<i", metadata, table)[0]
        slot = 4 + 2 * number
        if slot >= struct.unpack_from("<H", metadata, vtable)[0]:
            return None
        offset = struct.unpack_from("<H", metadata, vtable + slot)[0]
        return table + offset if offset else None

    def pointed(place: int | None) -> int:
        if place is None:
            raise ValueError("cannot be read as Arrow (a message without a header)")
        return place + struct.unpack_from("<I", metadata, place)[0]

    root = pointed(0)
    kind = field(root, 1)
    held = 0 if kind is None else metadata[kind]
    if held not in (_BATCH, _DICTIONARY):
        return False
    batch = pointed(field(root, 2))
    return field(pointed(field(batch, 1)) if held == _DICTIONARY else batch, 3) is not None


def _check_shape(schema: Any, rows: int) -> None:
    """Raises ``ValueError`` for too many columns or rows, or types that lie too deep inside one another."""
    _check_rows(rows)
    if len(schema) > LIMITS.columns:
        raise ValueError(f"has {len(schema):,} columns; at most {LIMITS.columns:,} are read")
    level = [(one.name, one.type) for one in schema]
    for _ in range(MAX_DEPTH):
        for name, kind in level:
            _check_kind(name, kind)
        level = [(name, kind.field(n).type) for name, kind in level for n in range(kind.num_fields)]
        if len(level) > LIMITS.columns:
            raise ValueError(f"has more than {LIMITS.columns:,} columns inside others")
    if level:
        raise ValueError(f"has columns nested over {MAX_DEPTH} levels deep")


def _check_kind(column: str, kind: Any) -> None:
    """Raises ``ValueError`` for a type that the package datasets does not read."""
    import pyarrow as pa

    if any(of(kind) for of in (pa.types.is_map, pa.types.is_union, pa.types.is_interval, pa.types.is_run_end_encoded)):
        raise ValueError(
            f"has the column {printable(column)} of type {printable(str(kind))}, which is not read: leave the column "
            "out, or write it as structs or as texts of JSON"
        )


def _check_rows(rows: int) -> None:
    if rows > LIMITS.records:
        raise ValueError(f"has more than {LIMITS.records:,} rows")


def _check_total(total: int, most: int) -> None:
    if total > most:
        raise ValueError(f"unpacks to more than {most:,} bytes, the most for a file of its size")


def _binary(array: Any) -> int:
    """The bytes of an array's pictures and clips."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        return sum(map(_binary, array.chunks))
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        return array.nbytes
    if pa.types.is_struct(array.type):
        return sum(map(_binary, array.flatten()))
    return _binary(array.flatten()) if array.type.num_fields and hasattr(array, "flatten") else 0


def _values(array: Any) -> int:
    """The values inside lists and structs of an array."""
    import pyarrow as pa

    if pa.types.is_struct(array.type):
        return sum(len(part) + _values(part) for part in array.flatten())
    if array.type.num_fields and hasattr(array, "flatten"):
        inner = array.flatten()
        return len(inner) + _values(inner)
    return 0
