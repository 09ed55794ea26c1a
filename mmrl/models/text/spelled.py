"""Read the text of a prompt as text, whatever it spells: a control token in it stays the characters that it is.

Only what the chat template itself writes becomes control tokens. A control token in the system message, in a turn or in
the message to answer is split by a seam, a token that no model has, which is taken out again behind the tokenizer: the
model reads the same characters, in other tokens. Text without control tokens is read as the tokenizer reads it. Where
an engine makes tokens of text itself, a space is the seam, and stays.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Generic, TypeVar

from torch import Tensor

from mmrl.core.trajectory import Prompt, Turn
from mmrl.models.text.conditioner import Processor, Tokenizer, tokenizer_of
from mmrl.models.text.control_tokens import ControlTokens
from mmrl.models.text.conversation import PLACEHOLDER
from mmrl.models.text.features import PER_TOKEN

Saved = TypeVar("Saved", Tokenizer, Processor)
SEAM = "\U000f5ea3\U000f5ea4"
"""Private characters."""
SHOWN = " "
"""The seam of texts that are shown, and of those that an engine makes tokens of."""


class SpelledTokens(UserWarning):
    """Prompts spell control tokens of the model; the message names the first such prompt."""


class Spelled(Generic[Saved]):
    """Final class. Reads prompts for the model of ``saved``. ``render``: a prompt in the chat format. ``shown``: seams
    are spaces, and stay."""

    def __init__(self, saved: Saved, render: Callable[[Prompt], str], *, shown: bool = False) -> None:
        self._saved, self._render, self._shown = saved, render, shown
        self.tokens = ControlTokens(saved)
        self._told = False

    def found(self, prompt: Prompt) -> dict[str, int]:
        """The control tokens that the prompt spells, and how often."""
        counted = Counter[str]()

        def count(text: str) -> str:
            counted.update(self.tokens.found(text))
            return text

        _changed(prompt, count)
        return dict(counted)

    def text(self, prompt: Prompt, render: Callable[[Prompt], str]) -> str:
        """The prompt as ``render`` makes it, with a space in each control token that it spells itself."""
        return self._seamed(prompt, SHOWN, render) if self.found(prompt) else render(prompt)

    def read(self, prompt: Prompt) -> tuple[str, Saved]:
        """The prompt in the chat format, and what makes its tokens. These go through ``joined``."""
        spelled = self.found(prompt)
        if not spelled:
            return self._render(prompt), self._saved
        if not self._told:
            self._told = True
            warnings.warn(
                f"the prompt {prompt.id} spells {', '.join(spelled)}, a control token of the model: it is read as "
                "plain text, in this and every other prompt (mmrl data check counts them)",
                SpelledTokens,
                stacklevel=2,
            )
        text = self.seamed(prompt, self._render)
        return text, self.reader(text)

    def seamed(self, prompt: Prompt, render: Callable[[Prompt], str]) -> str:
        """The prompt as ``render`` makes it, with a seam in each control token that it spells itself; ``ids`` reads
        it."""
        return self._seamed(prompt, SHOWN if self._shown else SEAM, render) if self.found(prompt) else render(prompt)

    def joined(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """``features`` of one prompt without the seams."""
        if "_reader" not in vars(self):
            return features
        ids = features["input_ids"]
        kept = ids != self._seam
        return {name: value[kept] if name in PER_TOKEN else value for name, value in features.items()}

    def plain(self, text: str) -> str:
        """``text`` with a seam in each control token that it spells; ``ids`` reads it."""
        seam = SHOWN if self._shown else SEAM
        return self.tokens.broken(text, seam) if self.tokens.found(text) else text

    def ids(self, text: str) -> list[int]:
        """The tokens of a text of the chat template, whose contents went through ``plain``."""
        made = tokenizer_of(self.reader(text))(text, add_special_tokens=False).input_ids
        return made if SEAM not in text else [token for token in made if token != self._seam]

    def reader(self, text: str) -> Saved:
        """What makes the tokens of such a text; these go through ``joined``."""
        return self._reader if SEAM in text else self._saved

    @cached_property
    def _reader(self) -> Saved:
        """``saved`` with the seam as a token."""
        from transformers import AddedToken

        tokenizer = copy.deepcopy(tokenizer_of(self._saved))
        tokenizer.add_tokens([AddedToken(SEAM, special=True, normalized=False)], special_tokens=True)
        if not isinstance(self._saved, Processor):
            return tokenizer
        made = copy.copy(self._saved)
        made.tokenizer = tokenizer
        return made

    @cached_property
    def _seam(self) -> int:
        return tokenizer_of(self._reader).convert_tokens_to_ids(SEAM)

    def _seamed(self, prompt: Prompt, seam: str, render: Callable[[Prompt], str]) -> str:
        """Raises as ``render``. Turns of the assistant are left to the template where it takes the control tokens out
        of them itself, as those of thoughts."""

        def broken(text: str) -> str:
            return self.tokens.broken(text, seam)

        whole = render(_changed(prompt, broken))
        said = [
            text for turn in prompt.turns if turn.role == "assistant" for text in (turn.text, *dict(turn.more).values())
        ]
        if not any(map(self.tokens.found, said)):
            return whole
        by_template = render(_changed(prompt, broken, assistant=False))
        same = Counter(self.tokens.found(by_template)) == Counter(self.tokens.found(whole))
        return by_template if same else whole


def _changed(prompt: Prompt, change: Callable[[str], str], *, assistant: bool = True) -> Prompt:
    """``prompt`` with each of its texts changed, but not the places of its media."""

    def asked(text: str) -> str:
        if not prompt.media:
            return change(text)
        parts = PLACEHOLDER.split(text)  # text, kind, text, ...
        return "".join(f"<{part}>" if n % 2 else change(part) for n, part in enumerate(parts))

    def said(role: str, text: str) -> str:
        return asked(text) if role == "user" else change(text) if assistant else text

    def turned(turn: Turn) -> Turn:
        return Turn(turn.role, said(turn.role, turn.text), tuple((key, said(turn.role, of)) for key, of in turn.more))

    return replace(
        prompt,
        system=None if prompt.system is None else change(prompt.system),
        turns=tuple(map(turned, prompt.turns)),
        text=asked(prompt.text),
    )
