"""The tokens of an answer behind its prompt: what the chat template makes of the conversation that it ends.

A template may write another answer than the text alone: an empty thought before it, white space without its ends, the
reasoning of its own key. So the whole conversation is rendered. A prompt is still encoded once for all its answers:
they begin where the whole first differs from the rendered prompt, which is its end, or a few tokens before it (a
template that begins every answer with a thought, and writes none into a finished one).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from mmrl.core.json_types import JsonObject
from mmrl.core.trajectory import REASONING, Prompt
from mmrl.models.text.chat import Conditioner
from mmrl.models.text.conditioner import tokenizer_of

_MARK = "ANSWER"
_SHOWN = 60


def content_of(answer: JsonObject) -> str:
    """The text of a message whose content is text."""
    return str(answer.get("content") or "")


def answer_tokens(
    conditioner: Conditioner, prompt: Prompt, answer: JsonObject, *, ends: bool = True, whole: bool = True
) -> tuple[list[int], int]:
    """The tokens of ``answer``, a message of the assistant, behind ``prompt``, and how many of the prompt's last tokens
    they replace. ``ends``: a template that writes no token that ends text gets one. ``whole``: all of the answer must
    be shown. Raises ``ValueError``, which says what the answer has or what the template does to it;
    ``BadPromptError`` where the template shows no such conversation."""
    for said in (content_of(answer), *(str(answer[key]) for key in REASONING if key in answer)):
        response_tokens(conditioner, said)
    asked, full = conditioner.render(prompt), conditioner.render(prompt, answer=answer)
    kept = shared(asked, full)
    if kept < len(asked):
        bare = conditioner.render(prompt, asks=False)
        if not full.startswith(bare) or not asked.startswith(bare):
            raise ValueError(
                "cannot be trained on: before an answer the chat template writes another prompt than before a question "
                f"to be answered ({full[kept : kept + _SHOWN]!r} in place of {asked[kept : kept + _SHOWN]!r}); set "
                "model.chat_template to one whose prompt stays"
            )
    if whole and (lost := _lost(full, kept, answer)):
        raise ValueError(
            f"is not shown as it is written: the chat template leaves out or changes {lost[:_SHOWN]!r}; write it as "
            "the template shows it (reasoning under the key that it reads), or set model.chat_template"
        )
    tokenizer = tokenizer_of(conditioner.saved)
    before, every = ([*tokenizer(text, add_special_tokens=False).input_ids] for text in (asked, full))
    same = shared(before, every)
    made = every[same:]
    if ends and not {*made} & {*conditioner.stop_tokens}:
        made.append(_end_of_text(conditioner))
    return made, len(before) - same


def response_tokens(conditioner: Conditioner, text: str) -> list[int]:
    """The tokens of ``text`` as a response. Raises ``ValueError`` where it has tokens that no response can have."""
    tokenizer = tokenizer_of(conditioner.saved)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    special = (n for n, token in tokenizer.added_tokens_decoder.items() if token.special)
    control = {*tokenizer.all_special_ids, *special}
    if tokenizer.unk_token_id is not None and tokenizer.decode([tokenizer.unk_token_id]) not in text:
        control.discard(tokenizer.unk_token_id)  # it stands for a character that the tokenizer does not know
    wrong = sorted({*tokens} & {*conditioner.stop_tokens, *conditioner.forbidden, *control})
    if wrong:
        raise ValueError(f"contains the control token {tokenizer.decode(wrong[:1])!r}")
    return tokens


def ending(conditioner: Conditioner) -> list[int]:
    """The tokens behind the text of an answer; a token that ends text is among them."""
    prompt, answer = Prompt("p", "Hi"), {"role": "assistant", "content": _MARK}
    behind = conditioner.render(prompt, answer=answer).rpartition(_MARK)[2]
    tokens = tokenizer_of(conditioner.saved)(behind, add_special_tokens=False).input_ids
    return tokens if {*tokens} & {*conditioner.stop_tokens} else [*tokens, _end_of_text(conditioner)]


def _end_of_text(conditioner: Conditioner) -> int:
    own = tokenizer_of(conditioner.saved).eos_token_id
    return conditioner.stop_tokens[0] if own is None else own


def _lost(full: str, kept: int, answer: JsonObject) -> str:
    """What of ``answer`` is not in ``full`` behind its first ``kept`` characters, but for white space; else empty."""
    shown, before = squeezed(full), len(squeezed(full[:kept]))
    for said in (content_of(answer), *(str(answer[key]) for key in REASONING if key in answer)):
        wanted = squeezed(said)
        at = shown.rfind(wanted)
        if at < 0 or at + len(wanted) < before:
            return said
    return ""


def shared(one: Sequence[object], other: Sequence[object]) -> int:
    """How many elements both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def squeezed(text: str) -> str:
    """``text`` without white space."""
    return "".join(text.split())
