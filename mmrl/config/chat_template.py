"""A chat template that a recipe sets in place of the checkpoint's (``model.chat_template``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmrl.config.names import resolve
from mmrl.core.json_types import JsonObject, as_object

_TAG = "unknown tag 'generation'"
"""transformers adds this tag to Jinja's."""


def with_template_read(root: Path, values: JsonObject) -> JsonObject:
    """``values`` of a recipe with the text of the file that ``model.chat_template`` names, looked up from ``root``.

    A run stores the text, so that resuming uses the same template even if the file changes. A value that is not a
    readable file is left unchanged; ``checked`` reports it.
    """
    model = values.get("model")
    said = model.get("chat_template") if isinstance(model, Mapping) else None
    if not isinstance(said, str) or not said or _is_template(said):
        return values
    file = resolve(root, said)
    if not os.path.isfile(file):  # not opened: a pipe or a device may never end
        return values
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):  # it may not be read, or is no UTF-8
        return values
    return {**values, "model": {**as_object(model), "chat_template": text}}


def checked(text: str) -> str:
    """Return ``text``; raises ``ValueError`` if it is not a Jinja template. transformers renders it in a sandbox."""
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
