"""Bring recipes and runs of older versions and other installations to the names and paths of today."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mmrl.core.json_types import Json, JsonObject, as_object
from mmrl.core.plugins.loading import Kind, folders

MOVED = {"model.compile": "performance.compile", "sampling.chat_template": "sampling.chat_template_kwargs"}
_KINDS: tuple[Kind, ...] = ("pipelines", "rewards", "datasets")


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


def moved(settings: JsonObject, *, missing_only: bool = False) -> JsonObject:
    """``settings`` of a run with the paths of shipped files (models, examples) as they are here.

    A path names a shipped file where its part after the last ``/pipelines/`` (``/rewards/``, ``/datasets/``) exists in
    this installation. ``missing_only`` leaves paths alone that still exist.
    """
    return as_object(_moved(settings, missing_only))


def _moved(value: Json, missing_only: bool) -> Json:
    if isinstance(value, dict):
        return {key: _moved(of, missing_only) for key, of in value.items()}
    if isinstance(value, list):
        return [_moved(of, missing_only) for of in value]
    if not isinstance(value, str) or not value.startswith("/") or (missing_only and Path(value).exists()):
        return value
    for kind in _KINDS:
        _, found, rest = value.rpartition(f"/{kind}/")
        for root in folders(kind) if found else ():
            if rest and (root / rest).exists():
                return str(root / rest)
    return value
