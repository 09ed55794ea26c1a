"""Find the JSON object in a judge's answer, and check it against the recipe's JSON Schema (Draft 2020-12).

``jsonschema`` is imported where it is used: 0.1 s that a judge of yes and no does without.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mmrl.errors import UserError
from mmrl.json_types import Json, JsonObject

if TYPE_CHECKING:
    from jsonschema import ValidationError

_THOUGHT = r"(?:think(?:ing)?|seed:think)"
_THOUGHT_BEGINS = re.compile(rf"^[ \t]*(?:<{_THOUGHT}>|\[THINK\])", re.MULTILINE | re.IGNORECASE)
_THOUGHT_IS_OPEN = re.compile(rf"(?:<{_THOUGHT}>|\[THINK\])\Z", re.IGNORECASE)
_THOUGHT_ENDS = re.compile(rf"</{_THOUGHT}>|\[/THINK\]", re.IGNORECASE)
_TRIES = 500
"""Braces at which an object may begin: an answer of braces alone must not take minutes."""
_KEYWORDS = {"type", "enum", "const", "properties", "required", "additionalProperties", "items"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_SIZES = {"minItems", "maxItems", "minLength", "maxLength"}
_ANNOTATIONS = {"title", "description", "default", "examples", "$schema"}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_LONGEST = 200
"""Characters of a reason: it may quote the answer, which may be long."""


def check_schema(given: Json, where: str) -> JsonObject:
    """The schema ``given``. Raises ``UserError`` naming ``where`` for what is none, and for an unsupported keyword.

    A keyword that the validator does not know would be ignored, a misspelt one too; ``$ref`` may lead to the network,
    and the time for ``pattern`` or ``uniqueItems`` is in the hands of who writes the answer.
    """
    from jsonschema import Draft202012Validator, SchemaError

    schema = _check_keywords(given, where)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        said = error.message
        if error.path and error.path[-1] == "type":
            said = f"{error.instance!r} is no JSON type; there are {', '.join(_TYPES)}"
        raise UserError(f"{where}{error.json_path.removeprefix('$')}: {said}") from None
    return schema


def mismatch(value: Json, schema: JsonObject) -> str | None:
    """Where ``value`` departs from ``schema`` first; None where it does not."""
    from jsonschema import Draft202012Validator
    from referencing import Registry

    try:
        error = next(Draft202012Validator(schema, registry=Registry()).iter_errors(value), None)
    except RecursionError:  # the validator quotes the value, however deep that is
        return "it is nested too deeply"
    return None if error is None else _in_words(error)[:_LONGEST]


def json_in(text: str) -> JsonObject:
    """The JSON object that ``text`` is, or the last one in it (after reasoning, or fenced). Raises ``ValueError``."""
    decoder = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique)
    found: list[JsonObject] = []
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


def _check_keywords(schema: Json, where: str) -> JsonObject:
    if not isinstance(schema, Mapping):
        raise UserError(f"{where}: expected a JSON schema (a mapping), got {type(schema).__name__}")
    supported = _KEYWORDS | _BOUNDS | _SIZES
    unknown = set(schema) - supported - _ANNOTATIONS
    if unknown:
        raise UserError(
            f"{where}: the keyword {sorted(unknown)[0]!r} is not supported; there are {', '.join(sorted(supported))}"
        )
    if not isinstance(schema.get("additionalProperties", True), bool):
        raise UserError(f"{where}.additionalProperties: only true and false are supported")
    properties = schema.get("properties")
    for name, inner in properties.items() if isinstance(properties, Mapping) else ():
        _check_keywords(inner, f"{where}.properties.{name}")
    if "items" in schema:
        _check_keywords(schema["items"], f"{where}.items")
    return schema


def whole_numbers(value: Json) -> list[int] | None:
    """``value`` where it is a list of whole numbers, else None."""
    if not isinstance(value, list):
        return None
    numbers = [v for v in value if isinstance(v, int) and not isinstance(v, bool)]
    return numbers if len(numbers) == len(value) else None


def _in_words(error: ValidationError) -> str:
    value, schema = error.instance, error.schema if isinstance(error.schema, Mapping) else {}
    where = error.json_path.removeprefix("$").removeprefix(".") or "it"
    match error.validator:
        case "type":
            kinds = schema["type"]
            return f"{where} is a {type(value).__name__}, not {kinds if isinstance(kinds, str) else ' or '.join(kinds)}"
        case "required":
            return f"{where} has no {next(name for name in schema['required'] if name not in value)!r}"
        case "additionalProperties" if isinstance(value, dict):
            extra = set(value) - set(schema.get("properties", {}))
            return f"{where} has {min(extra)!r}, which the schema does not"
        case "minimum" | "maximum":
            return f"{where} is {value}, outside {schema.get('minimum', '')}..{schema.get('maximum', '')}"
        case _:
            return f"{where}: {error.message}"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)
