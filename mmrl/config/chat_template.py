"""A chat template of the recipe's own, in place of the checkpoint's (``model.chat_template``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmrl.config.names import resolve
from mmrl.json_types import JsonObject, as_object

_TAG = "unknown tag 'generation'"
"""transformers has this tag beside Jinja's own."""


def with_template_read(root: Path, values: JsonObject) -> JsonObject:
    """``values`` of a recipe with the text of the file that ``model.chat_template`` names, looked up from ``root``.

    A run keeps the text, so that it goes on with the same template whatever becomes of the file. What is no readable
    file stays, and ``checked`` says so.
    """
    model = values.get("model")
    said = model.get("chat_template") if isinstance(model, Mapping) else None
    if not isinstance(said, str) or not said or _is_template(said):
        return values
    file = resolve(root, said)
    if not os.path.isfile(file):
        return values
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return values
    return {**values, "model": {**as_object(model), "chat_template": text}}


def checked(text: str) -> str:
    """``text``, which must be a Jinja template. Raises ``ValueError``. It is rendered in a sandbox, by transformers."""
    if not _is_template(text):
        raise ValueError(
            f"there is no file {text[:80]!r} of UTF-8 text, and a template has {{{{ or {{% in it; correct the path"
        )
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        environment.parse(text)
    except TemplateSyntaxError as error:
        if _TAG not in str(error.message):
            raise ValueError(f"line {error.lineno} of the template: {error.message}; mend it there") from None
    return text


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text
