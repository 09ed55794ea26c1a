"""Bring runs of other installations to the paths of this one."""

from __future__ import annotations

from pathlib import Path

from mmrl.core.json_types import Json, JsonObject, as_object
from mmrl.core.plugins.loading import Kind, folders

_KINDS: tuple[Kind, ...] = ("pipelines", "rewards", "datasets")


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
