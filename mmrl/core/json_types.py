"""Types of JSON data: what `json.loads` returns, what records, metrics and endpoints hold."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

JsonScalar: TypeAlias = bool | int | float | str | None
# The containers are read-only, so that a `dict[str, int]` is JSON data too.
Json: TypeAlias = "JsonScalar | Sequence[Json] | Mapping[str, Json]"
JsonObject: TypeAlias = Mapping[str, Json]
Cell: TypeAlias = "JsonScalar | bytes | Sequence[Cell] | Mapping[str, Cell]"
"""A value of a data set's record: JSON data, or bytes in a table."""
MutableJson: TypeAlias = "JsonScalar | list[MutableJson] | dict[str, MutableJson]"
"""JSON data that is changed in place, such as the values of a recipe whose layers are merged."""


def finite(value: float | None) -> float | None:
    """``value``, or None where it is no number that JSON has (nan, the infinities)."""
    return value if value is not None and math.isfinite(value) else None


def elements(value: object) -> list[Any]:
    """Those of a list, and none where ``value`` is something else: what may be anybody's is read so."""
    return value if isinstance(value, list) else []


def as_integer(value: Json) -> int:
    """``value``, which must be a whole number. Raises ``TypeError``."""
    if not isinstance(value, int):
        raise TypeError(f"expected a whole number, got {value!r}")
    return value


def as_number(value: Json) -> float:
    """``value``, which must be a number. Raises ``TypeError``."""
    if not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {value!r}")
    return value


def as_text(value: Json) -> str:
    """``value``, which must be text. Raises ``TypeError``."""
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value


def as_list(value: Json) -> Sequence[Json]:
    """``value``, which must be a list. Raises ``TypeError``."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"expected a list, got {value!r}")
    return value


def as_object(value: Json) -> JsonObject:
    """``value``, which must be a mapping. Raises ``TypeError``."""
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a mapping, got {value!r}")
    return value


def value_at(values: Json, path: Sequence[str | int]) -> Json:
    """What lies in ``values`` at ``path``, keys of mappings and places of lists; None where there is nothing."""
    for part in path:
        if isinstance(values, Mapping):
            values = values.get(part) if isinstance(part, str) else None
        elif isinstance(values, list | tuple) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            return None
    return values


def item(container: MutableJson, key: str | int) -> MutableJson:
    """``container[key]``. Raises ``KeyError`` or ``IndexError``, and ``TypeError`` where no such key can be in it."""
    match container, key:
        case dict(), str():
            return container[key]
        case list(), int():
            return container[key]
        case _:
            raise TypeError(f"{type(container).__name__} has no {key!r}")


def set_item(container: MutableJson, key: str | int, value: MutableJson) -> None:
    """``container[key] = value``. Raises as ``item``."""
    match container, key:
        case dict(), str():
            container[key] = value
        case list(), int():
            container[key] = value
        case _:
            raise TypeError(f"{type(container).__name__} has no {key!r}")
