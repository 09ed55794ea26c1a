"""Find control tokens that a text spells, and break them so that no tokenizer reads one.

A control token is a special token, or an added one that is written with signs (``<think>``, ``[IMG]``), or a mark that
a processor looks for in a text (``<video>``). Added tokens of letters or white space alone are words.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import
    from tokenizers import AddedToken, Tokenizer

_ROUNDS = 8
"""Breaking one token can let another one appear, a few times at most."""


class ControlTokens:
    """Final class. The control tokens of ``saved``, a tokenizer of transformers or a processor."""

    def __init__(self, saved: object) -> None:
        tokenizer = getattr(saved, "tokenizer", saved)
        added: Mapping[int, AddedToken] = getattr(tokenizer, "added_tokens_decoder", {})
        control = {n: of for n, of in added.items() if of.special or re.search(r"[^\w\s]", of.content)}
        own: Mapping[str, object] = getattr(saved, "__dict__", {})
        marks = {str(mark) for name, mark in own.items() if re.search(r"_(?:token|tag)$", name) and mark}
        texts = {of.content for of in control.values()} | {*getattr(tokenizer, "all_special_tokens", ())} | marks
        self.texts = sorted((text for text in texts if len(text) > 1), key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._names = {n: of.content for n, of in control.items() if len(of.content) > 1}
        self._backend: Tokenizer | None = None
        backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        by_model = type(getattr(backend, "model", None)).__name__ == "Unigram"  # control tokens are in its vocabulary
        normalized = by_model or any(of.normalized for of in control.values())
        if backend is not None and backend.normalizer is not None and normalized:
            self._backend = backend = copy.deepcopy(backend)
            backend.no_truncation()
            backend.no_padding()

    def found(self, text: str) -> list[str]:
        """The control tokens that ``text`` spells, in their order."""
        return [name for _, _, name in self._spans(text)]

    def broken(self, text: str, seam: str) -> str:
        """``text`` with ``seam`` behind the first character of each control token that it spells."""
        for _ in range(_ROUNDS):
            spans = self._spans(text)
            if not spans:
                return text
            for begin, end, _ in reversed(spans):
                first = begin + len(text[begin:end]) - len(text[begin:end].lstrip()) + 1
                text = text[:first] + seam + text[first:]
        return seam.join(text)

    def _spans(self, text: str) -> list[tuple[int, int, str]]:
        found = [(*m.span(), m[0]) for m in self._pattern.finditer(text)]
        return found or list(self._normalized(text))

    def _normalized(self, text: str) -> Iterator[tuple[int, int, str]]:
        """What becomes a control token once the tokenizer has normalised it: other letters, other widths."""
        if self._backend is None:
            return
        made = self._backend.encode(text, add_special_tokens=False)
        for token, (begin, end) in zip(made.ids, made.offsets, strict=True):
            if token in self._names and len(text[begin:end].strip()) > 1:
                yield begin, end, self._names[token]
