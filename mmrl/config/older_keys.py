"""Rename keys of older recipes and runs to their names of today."""

from __future__ import annotations

from collections.abc import Mapping

from mmrl.json_types import JsonObject, as_object

MOVED = {"model.compile": "performance.compile", "sampling.chat_template": "sampling.chat_template_kwargs"}


def renamed(values: JsonObject) -> JsonObject:
    """``values`` of a recipe with every key under its name of today. Raises ``ValueError`` if both names are given with
    different values."""
    for old, new in MOVED.items():
        (before, key), (after, name) = old.split("."), new.split(".")
        section, into = values.get(before), values.get(after)
        if not isinstance(section, Mapping) or key not in section or not isinstance(into, Mapping | None):
            continue
        given = section[key]
        if old == "sampling.chat_template" and isinstance(given, str):
            raise ValueError(
                f"{old}: write a template, or a file with one, as model.chat_template; {new} has its variables"
            )
        if into and into.get(name, given) != given:
            raise ValueError(f"{old}: it is called {new} now, which is also set, to a different value; remove it")
        values = {**values, before: {k: v for k, v in section.items() if k != key}}
        values = {**values, after: {**as_object(values.get(after) or {}), name: given}}
    return values
