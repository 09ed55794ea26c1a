"""Escape untrusted text before a judge reads it: control tokens, and marks of the rubric's own frame.

A response could otherwise end its own turn and answer for the judge, or close the tag around it and continue as the
rubric. Text without such tokens and marks is not changed. Pure functions of plain strings.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

_ANGLE = (
    # ChatML, Llama 3 and 4, Phi, GLM, harmony, Kimi: <|im_start|>; DeepSeek (fullwidth); Gemma 4: <|turn>, <turn|>
    r"[|\uff5c][^<>\n]{0,64}[|\uff5c]>",
    r"[|\uff5c][\w:/\"-]{1,64}>",
    r"[\w:/-]{1,64}[|\uff5c]>",
    # Llama 2, Gemma, GLM, InternLM, Cohere, Nemotron, Baichuan, T5, Seed
    r"/?s>",
    r"</?SYS>>",
    r"/?(?:start|begin|end)_of_\w+>",
    r"/?(?:bos|eos|pad|unk|mask|sep|cls|sop|eop|eot|eoh|eoa)>",
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
    # GLM, BERT, InternLM, Kimi, EXAONE, MiniMax
    r"(?:gMASK|sMASK|MASK|CLS|SEP|PAD|UNK|BOS|EOS|EOT|UNUSED_TOKEN_\d+)\]",
    r"\|[^\[\]\n]{0,64}\|\]",
    r"e~\[",
)
_CONTROL = re.compile(rf"<(?={'|'.join(_ANGLE)})|\[(?={'|'.join(_SQUARE)})|\](?=~!?b[\[\]])")
_TAG = re.compile(r"</?\s*([A-Za-z_][\w.:-]*)(?:[^<>\n]*)>")
_MARK = re.compile(r"\[{1,2}/?[A-Za-z][^\[\]\n]{1,80}\]{1,2}|`{3,}|~{3,}|\"{3}|'{3}")
_HEADING = re.compile(r"^[ \t]*(#{1,6}[ \t]*\S[^\n]{0,80}|[-=*_]{3,80})[ \t]*$", re.MULTILINE)
_TYPED = re.compile(r"[\t-\r\x1c-\x1e -~]*")
_INSERTED = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", re.DOTALL)
_NUMBERED = re.compile(r"([^\n{}%]*)\{\{-?\s*loop\.index0?\s*(?:[+-]\s*\d+\s*)?-?\}\}")
_LINE_ENDS = "\t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_LINE_BEGINS = r"(?:^|(?<=[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]))"
_CYRILLIC = "\u0430\u0435\u043e\u0440\u0441\u0445\u0443\u0456\u0458\u0455\u04bb\u0501\u051b"
_GREEK = "\u03b1\u03b5\u03bf\u03c1\u03c7\u03c5\u03b9\u03bd\u03c4\u03ba\u0131"
_LOOKS = {
    **dict(zip(_CYRILLIC + _GREEK, "aeopcxyijshdqaeopxyivtki", strict=True)),
    **dict.fromkeys("\u2039\u2329\u3008\u27e8\u276e\u29fc\u226a\u00ab\u02c2\u1438", "<"),
    **dict.fromkeys("\u203a\u232a\u3009\u27e9\u276f\u29fd\u226b\u00bb\u02c3\u1433", ">"),
    **dict.fromkeys("\u2044\u2215\u2571\u29f8\u1735", "/"),
    **dict.fromkeys("\u2018\u2019\u02bc\u2032", "'"),
    **dict.fromkeys("\u201c\u201d\u2033", '"'),
    **dict.fromkeys("\u3010\u3014\u27e6", "["),
    **dict.fromkeys("\u3011\u3015\u27e7", "]"),
    **dict.fromkeys("\u115f\u1160\u3164\uffa0\u2800", " "),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"),
}
"""Letters and marks that look as an ASCII one does."""


def without_control(text: str, further: Iterable[str] = ()) -> str:
    """``text`` with every control token broken by a space after its first character.

    The tokens of all families listed above, whatever the judge's own tokenizer, and the ``further`` ones.
    """
    text = _CONTROL.sub(lambda found: f"{found[0]} ", text)
    own = sorted(token for token in further if len(token) > 1)
    if own:  # a token may begin inside another, so only its first character is taken
        begins = "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in own)
        text = re.sub(begins, lambda found: f"{found[0]} ", text)
    return text


class Frame:
    """What a rubric's template writes around a response: its tags, marks in brackets, quotes of three characters,
    headings, and the numbers that a loop writes before its items.

    ``names``: further names of tags. ``items``: what the loop of the mode numbers, as in ``Step 2``.
    Texts are compared as they look: without invisible characters, and with full-width and similar letters as ASCII.
    """

    def __init__(self, template: str, names: Sequence[str] = (), items: str = "") -> None:
        literal = _INSERTED.sub("", template)
        tags = sorted({*names, *(found[1] for found in _TAG.finditer(literal))})
        marks = sorted({found[0].strip() for found in _MARK.finditer(literal)})
        self._tags = _any(rf"<(?=\s{{0,9}}/?\s{{0,9}}{_loose(name)}(?![\w-])[^<>]{{0,80}}>)" for name in tags)
        self._marks = _any(rf"{re.escape(mark[0])}(?={_loose(mark[1:])})" for mark in marks)
        headings = sorted({found[1].strip() for found in _HEADING.finditer(literal)})
        self._lines = _any(rf"{_LINE_BEGINS}[ \t]*{_loose(heading)}[ \t]*$" for heading in headings)
        words = {_letters(found[1]) for found in _NUMBERED.finditer(template)} | ({items} if items else set())
        self._numbers = _any(_numbered(word) for word in sorted(words))

    def kept_out_of(self, text: str) -> str:
        """``text`` in which no tag of the frame begins (``<`` is written ``&lt;``), no mark of it stands whole, and no
        line is a heading of it (it is quoted with ``>``)."""
        text = self._change(text, self._tags, lambda _: "&lt;")
        text = self._change(text, self._marks, lambda found: f"{found} ")
        return self._change(text, self._lines, lambda found: f"> {found}")

    def item(self, text: str) -> str:
        """``text``, which a loop shows, where no line but the first begins as its next item would: it is quoted."""
        return self._change(text, self._numbers, lambda found: f"> {found}")

    @staticmethod
    def _change(text: str, pattern: re.Pattern[str] | None, change: Callable[[str], str]) -> str:
        """``text`` with the first character of every piece changed that looks like one of the pattern."""
        if pattern is None:
            return text
        looks, places = _as_it_looks(text)
        made, last = [], 0
        for found in pattern.finditer(looks):
            at = places[found.start()]
            made += [text[last:at], change(text[at])]
            last = at + 1
        return "".join([*made, text[last:]])


def _as_it_looks(text: str) -> tuple[str, Sequence[int]]:
    """``text`` in lower case without invisible characters, with ASCII for what looks like it, and where in ``text``
    each character comes from."""
    if _TYPED.fullmatch(text):
        return text.lower(), range(len(text))
    looks: list[str] = []
    places: list[int] = []
    for at, character in enumerate(text):
        if character in _LINE_ENDS:
            plain = character
        elif unicodedata.category(character) in ("Cf", "Mn", "Me", "Cc"):
            continue
        else:
            plain = "".join(_LOOKS.get(c, c) for c in unicodedata.normalize("NFKC", character).casefold())
        looks.append(plain)
        places.extend([at] * len(plain))
    return "".join(looks), places


def _loose(words: str) -> str:
    """A pattern for ``words`` as they look, with any space where they have some."""
    looks = _as_it_looks(words)[0]
    return r"\s+".join(re.escape(word) for word in looks.split())


def _letters(before: str) -> str:
    """The last word before a number that a template writes; empty where there is none."""
    found = re.search(r"([^\W\d_][\w ]*?)\s*[#(\[]*\s*$", before)
    return _as_it_looks(found[1])[0] if found else ""


def _numbered(word: str) -> str:
    """A later line that begins with ``word`` and a number; without a word the number must end as one of a list."""
    begins = rf"{_LINE_BEGINS}(?!\A)[ \t>#*_`(\[-]*"
    return rf"{begins}{_loose(word)}\s*[#(\[]*\d" if word else rf"{begins}\d{{1,4}}\s*(?:[.)\]:](?!\d)|$)"


def fence_of(seed: int, texts: Sequence[str | None]) -> str:
    """A word for the tags of one question: eight characters drawn from ``seed`` and ``texts``, and in none of them.

    The same question has the same word, also in a run that is repeated or resumed; the author of a text cannot predict
    it.
    """
    contents = (json.dumps([seed, attempt, *texts]) for attempt in itertools.count())
    fences = (hashlib.blake2b(content.encode(), digest_size=4).hexdigest() for content in contents)
    return next(fence for fence in fences if not any(text and fence in text for text in texts))


def _any(patterns: Iterable[str]) -> re.Pattern[str] | None:
    """One pattern for all; None where there are none."""
    found = list(patterns)
    return re.compile("|".join(found), re.MULTILINE) if found else None
