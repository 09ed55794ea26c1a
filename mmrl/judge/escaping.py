"""Escape untrusted text before a judge reads it: control tokens, and marks of the rubric's own frame.

A response could otherwise end its own turn and answer for the judge, or close the tag around it and continue as the
rubric. Text without such tokens and marks is not changed. Pure functions of plain strings.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence

_ANGLE = (
    # ChatML, Llama 3 and 4, Phi, GLM, harmony, Kimi: <|im_start|>; DeepSeek (fullwidth); Gemma 4: <|turn>, <turn|>
    r"[|\uff5c][^<>\n]{0,64}[|\uff5c]>",
    r"[|\uff5c][\w:/\"-]{1,64}>",
    r"[\w:/-]{1,64}[|\uff5c]>",
    # Llama 2, Gemma, GLM, InternLM, Cohere, Nemotron, Baichuan, T5, Seed
    r"/?s>",
    r"</?SYS>>",
    r"/?(?:start|end)_of_\w+>",
    r"/?(?:bos|eos|pad|unk|mask|sop|eop|eot|eoh|eoa)>",
    r"(?:BOS|EOS|PAD|EOT|UNK|MASK)(?:_TOKEN)?>",
    r"(?:extra_id|reserved|reserved_token|SPECIAL|unused)_?\d+>",
    r"/?seed:\w+>",
    # thoughts and tools, which many vocabularies have as one token
    r"/?(?:think|tool_calls?|tool_response|tools|function_calls?)>",
    # placeholders of pictures, clips and sound
    r"/?(?:image|video|audio|img|im_patch|im_start|im_end|vid_start|vid_end|vision|ImageHere|global-img)>",
    r"/?(?:IMG|VIDEO|AUDIO)(?:_CONTEXT|_START|_END)?>",
    r"(?:image|video|audio)_(?:soft_token|placeholder|token|pad)>",
    r"(?:row_\d+_col_\d+|fake_token_around_image)>",
)
_SQUARE = (
    # Mistral, Magistral and Pixtral
    r"/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|THINK|MODEL_SETTINGS)\]",
    r"(?:ARGS|CALL_ID|IMG|IMG_BREAK|IMG_END|AUDIO|BEGIN_AUDIO|PREFIX|MIDDLE|SUFFIX)\]",
    # GLM, BERT, InternLM, MiniMax
    r"(?:gMASK|sMASK|MASK|CLS|SEP|PAD|UNK|UNUSED_TOKEN_\d+)\]",
    r"e~\[",
)
_CONTROL = re.compile(rf"<(?={'|'.join(_ANGLE)})|\[(?={'|'.join(_SQUARE)})|\](?=~!?b[\[\]])")
_TAG = re.compile(r"</?\s*([A-Za-z_][\w.:-]*)(?:[^<>\n]*)>")
_MARK = re.compile(r"\[{1,2}/?[A-Za-z][^\[\]\n]{1,80}\]{1,2}|`{3,}|\"{3}|'{3}")
_INSERTED = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", re.DOTALL)
_STEP_LINE = re.compile(r"([\n\r\v\f\x85\u2028\u2029])(?=[ \t>#*_`(\[-]*step\s*#?\d)", re.IGNORECASE)


def without_control(text: str, further: Iterable[str] = ()) -> str:
    """``text`` with every control token broken by a space after its first character.

    The tokens of all families listed above, whatever the judge's own tokenizer, and the ``further`` ones.
    """
    text = _CONTROL.sub(lambda found: f"{found[0]} ", text)
    for token in further:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


class Frame:
    """What a rubric's template writes around a response: its tags, marks in brackets, and quotes of three characters.

    ``names``: further names of tags.
    """

    def __init__(self, template: str, names: Sequence[str] = ()) -> None:
        literal = _INSERTED.sub("", template)
        tags = sorted({*names, *(found[1] for found in _TAG.finditer(literal))})
        marks = sorted({found[0] for found in _MARK.finditer(literal)})
        self._tags = _any(rf"<(?=\s{{0,9}}/?\s{{0,9}}{re.escape(name)}(?![\w-])[^<>]{{0,80}}>)" for name in tags)
        self._marks = _any(re.escape(mark) for mark in marks)

    def kept_out_of(self, text: str) -> str:
        """``text`` in which no tag of the frame begins (``<`` is written ``&lt;``) and no mark of it stands whole."""
        if self._tags is not None:
            text = self._tags.sub("&lt;", text)
        if self._marks is not None:
            text = self._marks.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        return text


def quoted_step(text: str) -> str:
    """A step in which no later line begins as another step would (``Step 2:``): such a line is quoted with ``>``."""
    return _STEP_LINE.sub(r"\1> ", text)


def fence_of(seed: int, texts: Sequence[str | None]) -> str:
    """A word for the tags of one question: eight characters drawn from ``seed`` and ``texts``, and in none of them.

    The same question has the same word, also in a run that is repeated or resumed; the author of a text cannot predict
    it.
    """
    for attempt in itertools.count():
        content = json.dumps([seed, attempt, *texts])
        fence = hashlib.blake2b(content.encode(), digest_size=4).hexdigest()
        if not any(text and fence in text for text in texts):
            return fence
    raise AssertionError("itertools.count has no end")


def _any(patterns: Iterable[str]) -> re.Pattern[str] | None:
    """One pattern for all, without case; None where there are none."""
    found = list(patterns)
    return re.compile("|".join(found), re.IGNORECASE) if found else None
