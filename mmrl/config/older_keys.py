"""Keys of older recipes and runs that have another name today."""

from __future__ import annotations

from collections.abc import Mapping

from mmrl.json_types import JsonObject, as_object

MOVED = {"model.compile": "performance.compile", "sampling.chat_template": "sampling.chat_template_kwargs"}


def renamed(values: JsonObject) -> JsonObject:
    """``values`` of a recipe with every key under its name of today. Raises ``ValueError`` where both names are given
    and say different things."""
    for old, new in MOVED.items():
        (before, key), (after, name) = old.split("."), new.split(".")
        section, into = values.get(before), values.get(after)
        if not isinstance(section, Mapping) or key not in section or not isinstance(into, Mapping | None):
            continue
        given = section[key]
        if old == "sampling.chat_template" and isinstance(given, str):
            raise ValueError(
                f"{old}: a template, or a file with one, is model.chat_template; {new} has variables of it"
            )
        if into and into.get(name, given) != given:
            raise ValueError(f"{old}: it is called {new} now, which says otherwise; remove it")
        values = {**values, before: {k: v for k, v in section.items() if k != key}}
        values = {**values, after: {**as_object(values.get(after) or {}), name: given}}
    return values
