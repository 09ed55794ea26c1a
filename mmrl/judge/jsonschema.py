"""A part of JSON Schema, enough for a judge's answer; a keyword outside it is refused, never ignored."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mmrl.errors import UserError

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
_THOUGHT = r"(?:think(?:ing)?|seed:think)"
_THOUGHT_BEGINS = re.compile(rf"^[ \t]*(?:<{_THOUGHT}>|\[THINK\])", re.MULTILINE | re.IGNORECASE)
_THOUGHT_IS_OPEN = re.compile(rf"(?:<{_THOUGHT}>|\[THINK\])\Z", re.IGNORECASE)
_THOUGHT_ENDS = re.compile(rf"</{_THOUGHT}>|\[/THINK\]", re.IGNORECASE)
_TRIES = 500
"""Braces at which an object may begin: an answer of braces alone must not take minutes."""
_ANNOTATIONS = {"title", "description", "default", "examples", "$schema"}
_KEYWORDS = {"type", "enum", "const", "properties", "required", "additionalProperties", "items"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_SIZES = {"minItems", "maxItems", "minLength", "maxLength"}


def check_schema(schema: Any, where: str) -> None:
    """Raise ``UserError`` naming ``where`` for a schema that ``mismatch`` could not apply in full."""
    if not isinstance(schema, Mapping):
        raise UserError(f"{where}: expected a JSON schema (a mapping), got {type(schema).__name__}")
    unknown = set(schema) - _KEYWORDS - _BOUNDS - _SIZES - _ANNOTATIONS
    if unknown:
        raise UserError(
            f"{where}: the keyword {sorted(unknown)[0]!r} is not supported; "
            f"there are {', '.join(sorted(_KEYWORDS | _BOUNDS | _SIZES))}"
        )
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in _TYPES:
            raise UserError(f"{where}.type: {kind!r} is no JSON type; there are {', '.join(_TYPES)}")
    for name in _BOUNDS | _SIZES:
        if name in schema and (isinstance(schema[name], bool) or not isinstance(schema[name], int | float)):
            raise UserError(f"{where}.{name}: expected a number, got {schema[name]!r}")
    if not isinstance(schema.get("additionalProperties", True), bool):
        raise UserError(f"{where}.additionalProperties: only true and false are supported")
    for name, inner in schema.get("properties", {}).items():
        check_schema(inner, f"{where}.properties.{name}")
    if "items" in schema:
        check_schema(schema["items"], f"{where}.items")


def mismatch(value: Any, schema: Mapping[str, Any], where: str = "it") -> str | None:
    """Where ``value`` departs from ``schema`` first; None where it does not."""
    kinds = schema.get("type")
    if kinds is not None:
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not any(_is(value, kind) for kind in kinds):
            return f"{where} is a {type(value).__name__}, not {' or '.join(kinds)}"
    if "enum" in schema and not any(_same(value, allowed) for allowed in schema["enum"]):
        return f"{where} is none of {schema['enum']}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{where} is not {schema['const']!r}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _out_of_bounds(value, schema, where)
    if isinstance(value, str | list):
        least, most = ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
        if len(value) < schema.get(least, 0) or len(value) > schema.get(most, len(value)):
            return f"{where} has {len(value)} {'characters' if isinstance(value, str) else 'items'}"
    if isinstance(value, list) and "items" in schema:
        return _first(mismatch(item, schema["items"], f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(value, dict):
        return _object_mismatch(value, schema, where)
    return None


def json_in(text: str) -> Any:
    """The JSON object that ``text`` is, or the last one in it (after reasoning, or fenced). Raises ``ValueError``."""
    decoder = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique)
    found: list[Any] = []
    at, tries = text.find("{"), 0
    while at >= 0 and tries < _TRIES:
        tries += 1
        try:
            value, end = decoder.raw_decode(text, at)
            found.append(value)
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)
    if not found:
        raise ValueError("holds no JSON object")
    return found[-1]


def without_thoughts(text: str) -> str:
    """``text`` after its last ``</think>``, which models that reason aloud put before their answer.

    Raises ``ValueError`` where a thought begins, as the first thing of a line, and never ends.
    """
    said = _THOUGHT_ENDS.split(text)[-1]
    if _THOUGHT_BEGINS.search(said):
        raise ValueError("is a thought that never ends (no </think>)")
    return said.strip()


def ends_in_a_thought(text: str) -> bool:
    """Whether ``text``, a question as the chat template writes it, ends with the beginning of a thought."""
    return _THOUGHT_IS_OPEN.search(text.rstrip()) is not None


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON, where true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return a == b


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _out_of_bounds(value: float, schema: Mapping[str, Any], where: str) -> str | None:
    if value < schema.get("minimum", value) or value > schema.get("maximum", value):
        return f"{where} is {value}, outside {schema.get('minimum', '')}..{schema.get('maximum', '')}"
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        return f"{where} is {value}, not above {schema['exclusiveMinimum']}"
    if "exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"]:
        return f"{where} is {value}, not below {schema['exclusiveMaximum']}"
    return None


def _object_mismatch(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> str | None:
    properties = schema.get("properties", {})
    for name in schema.get("required", []):
        if name not in value:
            return f"{where} has no {name!r}"
    if schema.get("additionalProperties", True) is False and (extra := set(value) - set(properties)):
        return f"{where} has {sorted(extra)[0]!r}, which the schema does not"
    return _first(mismatch(value[name], properties[name], name) for name in properties if name in value)


def _first(found: Any) -> str | None:
    return next((why for why in found if why is not None), None)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)
