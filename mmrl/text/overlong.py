"""Handle prompts with too many tokens: skip, cut, or an error (``data.overlong``).

Counted are the tokens of the whole prompt as the model reads it: the chat template's, the system message's and the
pictures' among them. To cut is to take words from the beginning of the user's text and keep its end, where the question
stands, as TRL's ``max_prompt_length`` and verl's ``truncation: left`` do; unlike them it leaves the template, the
system message and the pictures whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import Tensor

from mmrl.errors import BadPromptError, UserError
from mmrl.text.features import key_of
from mmrl.trajectory import Prompt

Overlong = Literal["skip", "cut", "error"]
PLACEHOLDER = re.compile("<(?:image|video)>")
"""Where a medium stands in the text of a prompt that has media; elsewhere these are words like others."""
MOST_CUT = 10_000
"""Texts of prompts that were cut, which are kept for engines; others are cut again."""
_TRIES = 8
"""Where a text is cut its tokens may change, so that a few more have to go."""


class OverlongError(BadPromptError):
    """A prompt that has more tokens than there is room for."""


@dataclass(frozen=True)
class Limit:
    """The most ``tokens`` of a prompt, and ``why``: for messages, after the number of its tokens."""

    tokens: int
    why: str


class Encoder(Protocol):
    """What is asked of a conditioner here."""

    def encode(self, prompt: Prompt) -> dict[str, Tensor]: ...

    def count(self, texts: Sequence[str]) -> list[int]: ...


def limit_of(most: int | None, new: int, context: int | None, engine: int | None) -> Limit | None:
    """The lowest of the limits there are; None without any.

    ``most``: ``sampling.max_prompt_tokens``; ``new``: tokens that the model's ``context`` must have room for beside the
    prompt; ``engine``: tokens an engine takes, prompt and response.
    """
    limits = []
    if most is not None:
        limits.append(Limit(most, f", and sampling.max_prompt_tokens is {most}"))
    if context is not None:
        why = (
            f"; with {new} new ones (sampling.max_new_tokens) it does not fit into the model's context of {context}"
            if new
            else f", and the model's context is {context}"
        )
        limits.append(Limit(context - new, why))
    if engine is not None:
        limits.append(Limit(engine - 1, f", and the engine's context (max_model_len) is {engine}"))
    return min(limits, key=lambda limit: limit.tokens, default=None)


class Fitter:
    """Final class. Makes prompts ready for the model, and ``overlong`` ones as the recipe says."""

    def __init__(self, encoder: Encoder, overlong: Overlong) -> None:
        self._encoder, self.overlong = encoder, overlong
        self._cut: dict[str, str] = {}

    def encode(
        self, prompt: Prompt, limit: Limit | None, overlong: Overlong | None = None
    ) -> tuple[Prompt, dict[str, Tensor]]:
        """The prompt as the model reads it, and its features; ``overlong`` in place of the recipe's. Raises
        ``OverlongError`` or, where that is ``error``, ``UserError``."""
        features = self._encoder.encode(prompt)
        length = len(features["input_ids"])
        if limit is None or length <= limit.tokens:
            return prompt, features
        how = overlong or self.overlong
        if how == "cut":
            shown, features = _cut(prompt, length, self._encoder, limit)
            if len(self._cut) >= MOST_CUT:
                self._cut.clear()
            self._cut[key_of(prompt)] = shown.text
            return shown, features
        if how == "error":
            raise UserError(
                f"data: the prompt {prompt.id} has {length} tokens{limit.why}; shorten it or take it out of the data, "
                "raise the limit, or set data.overlong to skip or cut"
            )
        raise OverlongError(prompt.id, f"it has {length} tokens{limit.why} (data.overlong: skip)")

    def shown(self, prompt: Prompt, limit: Limit | None) -> Prompt:
        """The prompt as the model reads it."""
        if self.overlong != "cut":
            return prompt
        text = self._cut.get(key_of(prompt))
        return self.encode(prompt, limit)[0] if text is None else replace(prompt, text=text)


def _cut(prompt: Prompt, length: int, encoder: Encoder, limit: Limit) -> tuple[Prompt, dict[str, Tensor]]:
    """Raises ``OverlongError`` where what cannot be cut is too long already."""
    cut, over = prompt, length - limit.tokens
    for _ in range(_TRIES):
        wanted = encoder.count([cut.text])[0] - over
        if wanted < 1:
            break
        cut = replace(cut, text=_end_of(cut, wanted, encoder))
        features = encoder.encode(cut)
        over = len(features["input_ids"]) - limit.tokens
        if over <= 0:
            return cut, features
    raise OverlongError(
        prompt.id, f"it has {length} tokens{limit.why}, and without its text too many still (data.overlong: cut)"
    )


def _end_of(prompt: Prompt, tokens: int, encoder: Encoder) -> str:
    """The longest end of its text with at most so many tokens, placeholders of its media not cut."""
    fewest, most = 0, len(prompt.text)  # characters to leave out
    while fewest < most:
        middle = (fewest + most) // 2
        if encoder.count([without_first(prompt, middle)])[0] <= tokens:
            most = middle
        else:
            fewest = middle + 1
    return without_first(prompt, fewest)


def without_first(prompt: Prompt, n: int) -> str:
    """The text of ``prompt`` without its first ``n`` characters, not counting placeholders of its media, which stay."""
    if not prompt.media:
        return prompt.text[n:]
    kept, at = "", 0
    for found in PLACEHOLDER.finditer(prompt.text):
        text = prompt.text[at : found.start()]
        kept, n, at = kept + text[n:] + found[0], max(0, n - len(text)), found.end()
    return kept + prompt.text[at:][n:]
