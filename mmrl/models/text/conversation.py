"""A prompt as the messages that a chat template renders."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmrl.core.errors import BadPromptError
from mmrl.core.json_types import JsonObject
from mmrl.core.trajectory import Prompt, Turn
from mmrl.models.text.conditioner import Messages, Processor, Tokenizer
from mmrl.models.text.template_probe import TemplateFaultError, parts_of, render

PLACEHOLDER = re.compile("<(image|video)>")
"""Where a picture or clip stands in a message of the user, of a prompt that has some."""
Message = JsonObject
MEND = "set model.chat_template to a template that does, or change those messages"


def unmarked(text: str) -> str:
    """``text`` with a space in what looks like the mark of a picture or clip."""
    return PLACEHOLDER.sub(r"< \1>", text)


def messages_of(prompt: Prompt, tools: str = "") -> list[Message]:
    """The system message, the turns and the message to answer, their contents as text. ``tools``: what the system
    message says of tools, behind its own text."""
    said = _system(prompt, tools)
    system: list[Message] = [{"role": "system", "content": said}] if said else []
    return [*system, *({"role": role, "content": text, **dict(more)} for role, text, more in _said(prompt))]


def messages_with_media(prompt: Prompt, tools: str = "") -> list[Message]:
    """The ``messages_of`` a prompt, with contents as lists of parts and a part for each picture and clip.

    Raises ``BadPromptError`` where placeholders and media do not match; of a prompt without media ``<image>`` is text.
    """
    given: Sequence[str] = [m.kind for m in prompt.media]
    texts = [text for role, text, _ in _said(prompt) if role == "user"]
    asked = [kind for text in texts for kind in PLACEHOLDER.findall(text)] if given else []
    if asked and asked != given:
        raise BadPromptError(
            prompt.id,
            f"it has the placeholders {', '.join(asked)} and the media {', '.join(given)}; give it one medium per "
            "placeholder, in their order, or no placeholder at all",
        )
    system: list[Message] = []
    if said := _system(prompt, tools):
        system = [{"role": "system", "content": [{"type": "text", "text": said}]}]
    before = [] if asked else [{"type": kind} for kind in given]  # the first message of the user takes them
    turns: list[Message] = []
    for role, text, more in _said(prompt):
        parts = _parts(text) if role == "user" and asked else [{"type": "text", "text": text}]
        if role == "user":
            parts, before = [*before, *parts], []
        turns.append({"role": role, "content": parts, **dict(more)})
    return [*system, *turns]


def rendered(
    prompt: Prompt,
    messages: Messages,
    saved: Tokenizer | Processor,
    variables: JsonObject,
    *,
    answer: Message | None = None,
    behind: Messages = (),
    asks: bool = True,
) -> str:
    """``messages`` of ``prompt`` in the chat format of ``saved``, up to where the answer begins; ``variables`` of the
    chat template. With an ``answer``: the conversation that ends with it; ``behind``: further messages. Not ``asks``:
    without what the template writes before an answer. Raises ``BadPromptError`` if the template does not show such a
    conversation."""
    try:
        whole = [*messages, *behind, *([] if answer is None else [_alike(answer, messages)])]
        return render(saved, whole, variables, asks=asks and answer is None)
    except TemplateFaultError as error:
        raise BadPromptError(prompt.id, f"{error}; {MEND}") from error


def _system(prompt: Prompt, tools: str) -> str:
    return "\n\n".join(text for text in (prompt.system, tools) if text)


def _said(prompt: Prompt) -> list[Turn]:
    return [*prompt.turns, Turn("user", prompt.text)]


def _alike(answer: Message, messages: Messages) -> Message:
    """``answer`` with its text as the contents of ``messages`` are: a list of parts where they are lists."""
    content = answer.get("content")
    lists = any(not isinstance(message.get("content"), str) for message in messages)
    return {**answer, "content": parts_of(content) if lists else content}


def _parts(text: str) -> list[dict[str, str]]:
    pieces = PLACEHOLDER.split(text)  # text, kind, text, kind, ..., text
    return [
        {"type": piece} if i % 2 else {"type": "text", "text": piece}
        for i, piece in enumerate(pieces)
        if i % 2 or piece
    ]
