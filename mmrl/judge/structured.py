"""Ask an OpenAI-compatible endpoint for an answer by a JSON Schema (``response_format``). Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from mmrl.json_types import Json, JsonObject

FORMS = ("json_schema", "json_object")
"""From the one that says most to the one that most endpoints have."""


def response_format(form: str, schema: JsonObject) -> JsonObject:
    """The field of a request that asks for an object by ``schema``; vLLM and SGLang hold every token to it."""
    if form == "json_object":
        return {"response_format": {"type": "json_object"}}
    named: JsonObject = {"name": "verdict", "schema": schema, "strict": _is_strict(schema)}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _is_strict(schema: Json) -> bool:
    """Whether each object in it names all of its fields, which ``strict`` asks for."""
    if not isinstance(schema, Mapping):
        return True
    properties, required = schema.get("properties"), schema.get("required")
    fields = properties if isinstance(properties, Mapping) else {}
    if schema.get("type") == "object" or fields:
        named = {str(name) for name in required} if isinstance(required, list | tuple) else set[str]()
        if schema.get("additionalProperties") is not False or set(fields) != named:
            return False
    return all(_is_strict(inner) for inner in [*fields.values(), schema.get("items")])
