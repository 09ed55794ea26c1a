"""The text of a recipe and of command-line settings as a run stores them: with secrets masked."""

from __future__ import annotations

import json

import yaml

from mmrl.config.layers import parse_key, parse_value
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.secrets import mask_text, masked


def masked_document(text: str, settings: JsonObject) -> str:
    """A recipe file without the secrets of ``settings``; comments and order are kept if possible."""
    shown = mask_text(text, settings)
    values = masked(_parsed(text))
    if values is None or _parsed(shown) == values:
        return shown
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)  # it has a tag, an escape or a folded scalar


def masked_override(text: str, settings: JsonObject) -> str:
    """A ``key=value`` without the secrets of ``settings``."""
    shown = mask_text(text, settings)
    key, _, value = shown.partition("=")
    names = [part for part in parse_key(key.strip()) or () if isinstance(part, str)]
    safe = masked(_parsed(text.partition("=")[2].strip()), names[-1] if names else "")
    return shown if safe == _parsed(value.strip()) else f"{key}={json.dumps(safe, ensure_ascii=False)}"


def _parsed(text: str) -> Json:
    try:
        return parse_value(text)
    except ValueError:  # the recipe could not be read either
        return None
