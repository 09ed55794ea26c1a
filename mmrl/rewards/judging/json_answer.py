"""Find the thoughts and the JSON object in a judge's answer, and check the object against the recipe's JSON Schema.

The schema is one of Draft 2020-12.

``jsonschema`` is imported where it is used: 0.1 s that a judge of yes and no does without.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.untrusted import no_constant
from mmrl.models.text.thoughts import BEGINS, ENDS, IS_OPEN

if TYPE_CHECKING:
    from jsonschema import ValidationError

_Found: TypeAlias = tuple[int, int, JsonObject]
"""An object with its place."""
_BRACE = re.compile("[{}]")
_STARTS = ("{", "```")
"""How an answer begins that is an object, without a thought before it."""
_NEVER_ENDS = "is a thought that never ends (no </think>)"
_KEYWORDS = {"type", "enum", "const", "properties", "required", "additionalProperties", "items"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_SIZES = {"minItems", "maxItems", "minLength", "maxLength"}
_ANNOTATIONS = {"title", "description", "default", "examples", "$schema"}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_WORD = re.compile(r"[^\W_]")
_MARKS = "\"'\u201c\u201d\u201e\u00ab\u00bb\u2039\u203a\u300c\u300d\u300e\u300f\u2018\u2019"
_BESIDE = re.compile(rf"[{_MARKS}]\s*\0|\0\s*[{_MARKS}]")
_AS_CODE = re.compile(r"(?<!`)`{1,2}\s*\0|\0\s*`{1,2}(?!`)")
_LONGEST = 200
"""Characters of a reason: it may quote the answer, which may be long."""


class UnreadableError(ValueError):
    """An answer of which no verdict can be read."""


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
    """The last outermost object of an answer, alone, after prose or a thought, or fenced. Raises ``UnreadableError``.

    An object that is no valid JSON, a brace that belongs to none, and a thought that never ends leave nothing to read:
    what stands inside a broken object may be quoted. An object that is quoted is text.
    """
    text = text.strip()
    ends = ENDS.search(text)
    found = None
    try:
        if ends is None or not BEGINS.match(text):
            found = _objects(text)
    except UnreadableError:
        if ends is None and BEGINS.search(text):
            raise UnreadableError(_NEVER_ENDS) from None
        if ends is None or begins_as_object(text):
            raise
    if found is None and ends is not None:
        text = text[ends.end() :]
        found = _objects(text)
    after = _end_of_thoughts(text, found or [])
    return _own(text, after, [one for one in found or [] if one[0] >= after])


def begins_as_object(text: str) -> bool:
    """Whether an answer begins with a brace or a fence, so that no thought stands before it."""
    return text.lstrip().startswith(_STARTS)


def without_thoughts(text: str) -> str:
    """``text`` after its last ``</think>``, which models that reason aloud put before their answer.

    Raises ``UnreadableError`` where a thought begins, as the first thing of a line, and never ends.
    """
    said = ENDS.split(text)[-1]
    if BEGINS.search(said):
        raise UnreadableError(_NEVER_ENDS)
    return said.strip()


def is_thought_mark(text: str) -> bool:
    """Whether ``text`` begins or ends a thought."""
    return IS_OPEN.fullmatch(text) is not None or ENDS.fullmatch(text) is not None


def ends_in_a_thought(text: str) -> bool:
    """Whether ``text``, a question as the chat template writes it, ends with the beginning of a thought."""
    return IS_OPEN.search(text.rstrip()) is not None


def with_thought_closed(text: str) -> str:
    """``text``, a question as the chat template writes it, with an end for the thought that it may begin."""
    found = IS_OPEN.search(text.rstrip())
    return text if found is None else f"{text.rstrip()}\n\n{found[0][0]}/{found[0][1:]}\n\n"


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


def _end_of_thoughts(text: str, found: list[_Found]) -> int:
    """Where the last mark that ends a thought ends, 0 without; a mark inside an object is text."""
    edges = [0, *(edge for start, end, _ in found for edge in (start, end)), len(text)]
    after = 0
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        for mark in ENDS.finditer(text, start, end):
            after = mark.end()
    if BEGINS.search(text, after):
        raise UnreadableError(_NEVER_ENDS)
    return after


def _own(text: str, after: int, found: list[_Found]) -> JsonObject:
    """The last of the objects behind ``after`` that the judge does not quote. Raises ``UnreadableError``.

    Of several, the last has no words behind it, nor before it in its line where an earlier one stands alone: what a
    judge quotes behind its verdict may look like one.
    """
    own: list[tuple[int, str, str, JsonObject]] = []
    for n, (start, end, value) in enumerate(found):
        line = text.rfind("\n", 0, start) + 1
        before = text[max(line, after, found[n - 1][1] if n else 0) : start]
        behind = text[end : found[n + 1][0] if n + 1 < len(found) else None].partition("\n")[0]
        if not text[max(line, after) : start].lstrip().startswith(">") and not _is_quoted(before, behind):
            own.append((end, before, behind, value))
    if not own:
        where = " but in quotes or within a sentence" if found else ""
        raise UnreadableError(f"holds no JSON object{where}")
    *earlier, (end, before, _, value) = own
    alone = any(not _WORD.search(left + right) for _, left, right, _ in earlier)
    if earlier and (_WORD.search(text, end) or (alone and _WORD.search(before))):
        raise UnreadableError("holds several JSON objects, and words beside the last, so that it may be a quotation")
    return value


def _is_quoted(before: str, behind: str) -> bool:
    """Whether an object is quoted between what stands before and behind it in its line."""
    words, place = [_WORD.search(part) is not None for part in (before, behind)], f"{before}\0{behind}"
    return all(words) or bool(_BESIDE.search(place)) or (any(words) and bool(_AS_CODE.search(place)))


def _objects(text: str) -> list[_Found]:
    """The outermost objects with their places. Raises ``UnreadableError`` where a brace outside them has no partner."""
    found: list[_Found] = []
    at = 0
    while (brace := _BRACE.search(text, at)) is not None:
        if brace[0] == "}":
            raise UnreadableError("has a } that closes no JSON object")
        try:
            value, at = _DECODER.raw_decode(text, brace.start())
        except RecursionError:
            raise UnreadableError("holds an object that is nested too deeply") from None
        except ValueError as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise UnreadableError(f"holds an object that is no valid JSON ({why[:_LONGEST]})") from None
        found.append((brace.start(), at, value))
    return found


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is no finite number")
    return number


def _whole(digits: str) -> int:
    _finite(digits)
    return int(digits)


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


_DECODER = json.JSONDecoder(
    parse_constant=no_constant, parse_float=_finite, parse_int=_whole, object_pairs_hook=_unique
)
