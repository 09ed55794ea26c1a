"""Conversations as data sets store them, brought to one form: a list of messages with ``role`` and ``content``.

- JSON in a text, as tables and CSV files have it.
- ShareGPT's form: ``from`` (``human``, ``gpt``, ``system``) and ``value``.
- one message in place of a list, as LLaMA-Factory's pairs have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from mmrl.datasets.record_media import SHOWN
from mmrl.json_types import Cell
from mmrl.trajectory import REASONING
from mmrl.untrusted import parse_json

INSIDE = "messages: "
"""What the name of a key inside messages begins with, among the names of a record's columns."""
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "function_call": "tool",
    "function_response": "tool",
    "observation": "tool",
    "tool": "tool",
}
"""ShareGPT's ``from`` and the role it means."""
_TOOLS = ("tool_calls", "function_call", "tool_call_id", "tools", "functions")
"""Keys of a message that change what it is."""
_READ = ("role", "content")
_PYTHON = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:")
"""A conversation as Python prints it."""


def as_messages(said: Cell) -> Cell:
    """``said`` as a list of messages where it is a conversation, else as it is. Raises ``ValueError`` for one that
    only Python can read."""
    if isinstance(said, str):
        found = _of_text(said)
        return said if found is None else as_messages(found)
    if isinstance(said, Mapping) and _is_message(said):
        return as_messages([said])
    messages = [m for m in said if isinstance(m, Mapping) and "from" in m] if isinstance(said, list) else []
    if isinstance(said, list) and messages and len(messages) == len(said) and not any("role" in m for m in messages):
        return [_of_sharegpt(m) for m in messages]
    return said


def keys_inside(said: Cell) -> Iterator[str]:
    """The names of keys of messages that nothing reads, of values that are there. Raises ``ValueError`` for a key that
    changes what the message is."""
    for message in said if isinstance(said, list) else ():
        if not isinstance(message, Mapping):
            continue
        calls = next((key for key in _TOOLS if message.get(key)), None)
        if calls is not None or message.get("role") == "tool":
            named = "" if calls is None else f" ({calls})"
            raise ValueError(
                f"has a message of a tool or a call of one{named}, and no chat here calls any; take it out"
            )
        reads = {*_READ, *(REASONING if message.get("role") == "assistant" else ())}
        yield from (INSIDE + str(key) for key, value in message.items() if key not in reads and value is not None)
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(part, Mapping) and isinstance(kind, str) and kind != "text":
                reads = {"type", "text", kind, "url", "path", *SHOWN}
                unread = [str(key) for key, value in part.items() if key not in reads and value is not None]
                yield from (f"{INSIDE}{kind}: {key}" for key in unread)


def reasoning_of(message: Mapping[str, Cell]) -> tuple[tuple[str, str], ...]:
    """The reasoning of a message of the assistant, by its key. Raises ``ValueError`` where it is no text."""
    found: list[tuple[str, str]] = []
    for key in REASONING:
        said = message.get(key)
        if said is not None and not isinstance(said, str):
            raise ValueError(f"has a message whose {key} is no text")
        if said:
            found.append((key, said))
    return tuple(found)


def _of_text(text: str) -> list[Cell] | None:
    """The messages that a text is, in JSON."""
    if not text.lstrip().startswith("[") or not text.rstrip().endswith("]"):
        return None
    try:
        found = parse_json(text)
    except ValueError:
        if _PYTHON.match(text):
            raise ValueError(
                "has a conversation as Python prints it, in place of JSON; write it with json.dumps, or store a list"
            ) from None
        return None
    if not isinstance(found, list) or not found or not all(isinstance(m, Mapping) and _is_message(m) for m in found):
        return None
    return [*found]


def _is_message(found: Mapping[str, Cell]) -> bool:
    return {"role", "content"} <= {*found} or {"from", "value"} <= {*found}


def _of_sharegpt(message: Mapping[str, Cell]) -> dict[str, Cell]:
    speaker = str(message["from"])
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": _SPEAKERS.get(speaker, speaker), "content": message.get("value"), **rest}


def roles_of(messages: Sequence[Cell]) -> Iterator[str]:
    """The roles of messages, for messages about them."""
    return (str(message.get("role")) for message in messages if isinstance(message, Mapping))
