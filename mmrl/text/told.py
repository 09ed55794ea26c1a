"""What a policy is told after a turn of its own, as tokens: the chat template's, behind what was sampled.

No text that was sampled is rendered again. The template renders a short conversation, with a mark in place of the
answer; what it writes behind the mark is what follows every answer. Its own pieces become control tokens, and the
content of a message becomes text whatever it spells.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mmrl.json_types import JsonObject
from mmrl.text.conditioner import Messages, Processor, Tokenizer
from mmrl.text.template_probe import TemplateFaultError, render


def behind_an_answer(saved: Tokenizer | Processor, variables: JsonObject, messages: Messages) -> str:
    """What the chat template writes behind an answer for ``messages``, up to where the next answer begins; it begins
    with what ends a turn. Raises ``TemplateFaultError`` where it does not show such messages."""
    texts = " ".join(str(message.get("content")) for message in messages)
    mark = next(text for n in itertools.count() if (text := f"Q{n}MARKQ") not in texts)
    asked = [{"role": "user", "content": "d"}, {"role": "assistant", "content": mark}, *messages]
    shown = render(saved, asked, variables, asks=True)
    if shown.count(mark) != 1:
        raise TemplateFaultError("the chat template does not show an answer before them once", shown)
    return shown.partition(mark)[2]


def without_repeated_end(told: Sequence[int], written: Sequence[int], stop: Sequence[int]) -> list[int]:
    """``told`` without the token that ends the turn, where it was sampled: the policy ended its turn itself."""
    both = told and written and told[0] in stop and written[-1] in stop
    return list(told[1:] if both else told)
