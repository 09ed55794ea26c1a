"""The calls of tools in what a model wrote, and how tools are described to a model whose chat template has no place
for them.

The format is that of Hermes and Qwen: a JSON object with ``name`` and ``arguments`` between ``<tool_call>`` and
``</tool_call>``. A call inside a thought is none. One that is cut, or no valid JSON, becomes a call with an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from mmrl.episodes.contract import Call
from mmrl.json_types import JsonObject

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_BEGIN, _END = "<think>", "</think>"


def calls_in(text: str, turn: int, *, begun: str = "") -> tuple[Call, ...]:
    """The calls of a turn, in their order. ``begun``: what the chat template wrote of it, the mark of a thought."""
    whole = begun + text
    said = whole.rpartition(_END)[2] if _END in whole else "" if _BEGIN in whole else whole
    return tuple(_calls(said, turn))


def _calls(text: str, turn: int) -> Iterator[Call]:
    for n, found in enumerate(_CALL.finditer(text)):
        id = f"call_{turn}_{n}"
        if not found[2]:
            yield Call(id, "", error="the call was cut before </tool_call>")
            continue
        try:
            value = json.loads(found[1], parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            yield Call(id, "", error=f"the call is no JSON: {error}")
            continue
        name = value.get("name") if isinstance(value, dict) else None
        arguments = value.get("arguments", {}) if isinstance(value, dict) else None
        if isinstance(name, str) and isinstance(arguments, dict):
            yield Call(id, name, arguments)
        else:
            yield Call(id, "", error='write a call as {"name": NAME, "arguments": {...}}')


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def described(schemas: Sequence[JsonObject]) -> str:
    """What the system message says of the tools, for a chat template that ignores ``tools``."""
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        f"You can call these tools:\n{listed}\n"
        'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call>. You are told its result. '
        "Without a call your message is the final answer."
    )
