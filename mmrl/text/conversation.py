"""A prompt as the messages that a chat template renders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, Protocol

from jinja2 import TemplateError

from mmrl.errors import BadPromptError, UserError
from mmrl.json_types import Json, JsonObject
from mmrl.text.conditioner import Messages, Processor, Tokenizer
from mmrl.trajectory import Prompt, Turn

PLACEHOLDER = re.compile("<(image|video)>")
"""Where a picture or clip stands in a message of the user, of a prompt that has some."""
Message = JsonObject


class Template(Protocol):
    """A tokenizer or processor whose chat template can be replaced."""

    chat_template: str | None

    def apply_chat_template(
        self, messages: Messages, /, *, tokenize: Literal[False], add_generation_prompt: bool = False, **variables: Json
    ) -> str: ...


def messages_of(prompt: Prompt) -> list[Message]:
    """The system message, the turns and the message to answer, their contents as text."""
    system: list[Message] = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system, *({"role": role, "content": text} for role, text in _said(prompt))]


def messages_with_media(prompt: Prompt) -> list[Message]:
    """As ``messages_of``, with contents as lists of parts and a part for each picture and clip.

    Raises ``BadPromptError`` where placeholders and media do not match; of a prompt without media ``<image>`` is text.
    """
    given: Sequence[str] = [m.kind for m in prompt.media]
    texts = [text for role, text in _said(prompt) if role == "user"]
    asked = [kind for text in texts for kind in PLACEHOLDER.findall(text)] if given else []
    if asked and asked != given:
        raise BadPromptError(
            prompt.id,
            f"it has the placeholders {', '.join(asked)} and the media {', '.join(given)}; give it one medium per "
            "placeholder, in their order, or no placeholder at all",
        )
    system: list[Message] = []
    if prompt.system:
        system = [{"role": "system", "content": [{"type": "text", "text": prompt.system}]}]
    before = [] if asked else [{"type": kind} for kind in given]  # the first message of the user takes them
    turns: list[Message] = []
    for role, text in _said(prompt):
        parts = _parts(text) if role == "user" and asked else [{"type": "text", "text": text}]
        if role == "user":
            parts, before = [*before, *parts], []
        turns.append({"role": role, "content": parts})
    return [*system, *turns]


def rendered(prompt: Prompt, messages: Messages, saved: Tokenizer | Processor, variables: JsonObject) -> str:
    """``messages`` of ``prompt`` in the chat format of ``saved``, up to where the answer begins; ``variables`` of the
    chat template. Raises ``BadPromptError`` if the template refuses such a conversation."""
    try:
        return saved.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **variables)
    except TemplateError as error:
        raise BadPromptError(
            prompt.id,
            f"the chat template does not take its messages ({', '.join(str(m['role']) for m in messages)}): {error}",
        ) from error


def use_template(saved: Template, template: str, content: Json) -> None:
    """Give a tokenizer or processor the chat ``template``, and render a message of that ``content``. Raises
    ``UserError`` where the template fails, or does not show the message."""
    saved.chat_template = template
    try:
        shown = saved.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        raise UserError(f"model.chat_template: rendering a message fails: {error}; mend the template") from error
    if "Hi" not in shown:
        raise UserError(
            f"model.chat_template: of the message 'Hi' it makes {shown[:200]!r}, without its text; mend the template"
        )


def _said(prompt: Prompt) -> list[Turn]:
    return [*prompt.turns, Turn("user", prompt.text)]


def _parts(text: str) -> list[dict[str, str]]:
    pieces = PLACEHOLDER.split(text)  # text, kind, text, kind, ..., text
    return [
        {"type": piece} if i % 2 else {"type": "text", "text": piece}
        for i, piece in enumerate(pieces)
        if i % 2 or piece
    ]
