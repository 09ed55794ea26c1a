"""Shared by the tests of edits and others."""

import json
import types
import typing

from pydantic import BaseModel

from mmrl.config.schema import Recipe


def values(annotation: object, key: str) -> typing.Iterator[tuple[str, object]]:
    """Every leaf below a field, with values of its type."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for one in inner:
            yield from values(one, key)
    elif origin is typing.Annotated:
        yield from values(inner[0], key)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from values(field.annotation, f"{key}.{name}" if key else name)
    elif origin is typing.Literal:
        yield from ((key, value) for value in inner)
    else:
        numbers = {bool: (True, False), int: (0, 1, 2, 3, 7, 1000000), float: (0.0, 0.5, 1.0, 3.5)}
        yield from ((key, value) for value in numbers.get(annotation, ()))  # type: ignore[call-overload]


CHANGES = list(dict.fromkeys((key, json.dumps(value)) for key, value in values(Recipe, "")))
