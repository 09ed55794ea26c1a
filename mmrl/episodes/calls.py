"""The calls of tools in what a model wrote, and how tools are described to a model whose chat template has no place
for them.

Calls are read by the tokenizer's own ``response_template`` where it has one, as transformers' ``parse_response`` does,
or by a function of the user's. Else the format is that of Hermes and Qwen: a JSON object with ``name`` and
``arguments`` between ``<tool_call>`` and ``</tool_call>``. A call inside a thought is none. One that is cut, or cannot
be read, becomes a call with an error, which is told and never made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mmrl.core.episode import Call
from mmrl.core.json_types import JsonObject
from mmrl.core.plugins.loading import load_from_file
from mmrl.core.plugins.user_code import describe
from mmrl.core.untrusted import no_constant
from mmrl.models.text.conditioner import Processor, Tokenizer, tokenizer_of
from mmrl.models.text.thoughts import left_open

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_BEGIN, _END = "<think>", "</think>"


Reader = Callable[[str, Sequence[int], Sequence[int], int], tuple[Call, ...]]
"""The calls of a turn, of its text, its tokens, the tokens before it, and its number."""
BEFORE = 256
"""Tokens before a turn that a reader sees at most."""


def reader_of(own: str | None, saved: Tokenizer | Processor, schemas: Sequence[JsonObject]) -> Reader:
    """Who reads calls. ``own``: a function ``path/to/file.py:name`` of a text, which returns a list of mappings with
    ``name`` and ``arguments``."""
    tokenizer: Any = tokenizer_of(saved)
    if own is not None:
        find = load_from_file(own)
        return lambda text, tokens, before, turn: _read(lambda: find(text), turn)
    template = getattr(tokenizer, "response_template", None)
    if template is None:
        return lambda text, tokens, before, turn: calls_in(text, turn, begun=left_open(tokenizer.decode(before)))

    def by_template(text: str, tokens: Sequence[int], before: Sequence[int], turn: int) -> tuple[Call, ...]:
        def find() -> list[object]:
            given = {"prefix": tokenizer.decode(before), "tools": list(schemas)}
            said = tokenizer.parse_response(tokenizer.decode(tokens), template, **given)
            return [call.get("function") for call in said.get("tool_calls") or ()]

        return _read(find, turn)

    return by_template


def _read(find: Callable[[], Sequence[object]], turn: int) -> tuple[Call, ...]:
    try:
        return tuple(_call(f"call_{turn}_{n}", value) for n, value in enumerate(find()))
    except Exception as error:  # of a library's parser, or a user's
        return (Call(f"call_{turn}_0", "", error=f"the call cannot be read: {describe(error)}"),)


def _call(id: str, value: object) -> Call:
    if isinstance(value, Mapping):
        name, arguments = value.get("name"), value.get("arguments", {})
        if isinstance(name, str) and isinstance(arguments, dict):
            return Call(id, name, arguments)
    return Call(id, "", error='write a call as {"name": NAME, "arguments": {...}}')


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
            value = json.loads(found[1], parse_constant=no_constant)
        except (ValueError, RecursionError) as error:
            yield Call(id, "", error=f"the call is no JSON: {error}")
            continue
        yield _call(id, value)


def described(schemas: Sequence[JsonObject]) -> str:
    """What the system message says of the tools, for a chat template that ignores ``tools``."""
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        f"You can call these tools:\n{listed}\n"
        'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call>. You are told its result. '
        "Without a call your message is the final answer."
    )
