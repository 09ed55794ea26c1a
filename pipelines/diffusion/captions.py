"""Captions as text encoders read them: a control token of a tokenizer that a caption spells is broken by a space."""

from __future__ import annotations

import warnings

from mmrl.text.control_tokens import ControlTokens
from mmrl.text.spelled import SHOWN, SpelledTokens

from .adapter import Adapter
from .describe import tokenizer_of


class Captions:
    """Final class. The captions of the pipeline of ``adapter``, which may have several tokenizers."""

    def __init__(self, adapter: Adapter) -> None:
        found = [getattr(adapter.pipe, tokenizer_of(name), None) for name in adapter.encoders]
        self._tokens = [ControlTokens(tokenizer) for tokenizer in found if tokenizer is not None]
        self._told = False

    def plain(self, text: str) -> str:
        """``text`` without control tokens of the encoders; equal to it where it spells none."""
        made = text
        for tokens in self._tokens:
            made = tokens.broken(made, SHOWN)
        if made != text and not self._told:
            self._told = True
            warnings.warn(
                f"the prompt {text[:200]!r} spells a control token of a text encoder: it is read as {made[:200]!r}, as "
                "every other such prompt",
                SpelledTokens,
                stacklevel=2,
            )
        return made
