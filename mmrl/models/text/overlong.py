"""Handle prompts with too many tokens: skip, cut, or an error (``data.overlong``).

The length is that of the whole prompt as the model reads it, with the chat template, the system message and the
pictures. ``cut`` removes the beginning of the user's text and keeps its end, where the question usually is. TRL's
``max_prompt_length`` and verl's ``truncation: left`` cut on the same side, but also the template, the system message
and the pictures, which are kept whole here.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.trajectory import Prompt
from mmrl.models.text.chat import Conditioner
from mmrl.models.text.conditioner import tokenizer_of
from mmrl.models.text.conversation import PLACEHOLDER
from mmrl.models.text.features import key_of

Overlong = Literal["skip", "cut", "error"]
MOST_CUT = 10_000
"""The most texts of cut prompts that are kept for engines; older ones are cut again."""
_TRIES = 8
"""A cut can change how the text is tokenised, so that a few more tokens must go."""


class OverlongError(BadPromptError):
    """A prompt that has more tokens than there is room for."""


@dataclass(frozen=True)
class Limit:
    """The most ``tokens`` of a prompt. ``why`` is for messages; it follows the number of the prompt's tokens."""

    tokens: int
    why: str


def limit_of(
    most: int | None, new: int, context: int | None, engine: int | None, key: str = "sampling.max_new_tokens"
) -> Limit | None:
    """The lowest of the limits; None if there is no limit.

    ``most``: ``sampling.max_prompt_tokens``; ``new``: tokens that the model's ``context`` must also hold, by ``key``;
    ``engine``: the most tokens of an engine, prompt and response.
    """
    limits = []
    if most is not None:
        limits.append(Limit(most, f", and sampling.max_prompt_tokens is {most}"))
    if context is not None:
        why = (
            f"; with {new} new ones ({key}) it does not fit into the model's context of {context}"
            if new
            else f", and the model's context is {context}"
        )
        limits.append(Limit(context - new, why))
    if engine is not None:
        limits.append(Limit(engine - 1, f", and the engine's context (max_model_len) is {engine}"))
    return min(limits, key=lambda limit: limit.tokens, default=None)


class Fitter:
    """Final class. Encodes prompts, and treats ``overlong`` ones as the recipe says."""

    def __init__(self, conditioner: Conditioner, overlong: Overlong) -> None:
        self._conditioner, self.overlong = conditioner, overlong
        self._cut: dict[str, str] = {}

    def encode(
        self, prompt: Prompt, limit: Limit | None, overlong: Overlong | None = None
    ) -> tuple[Prompt, dict[str, Tensor]]:
        """The prompt as the model reads it, and its features. ``overlong`` replaces the recipe's setting. Raises
        ``OverlongError`` (``cut``: if the prompt without its text is too long) or, if the setting is ``error``,
        ``UserError``."""
        how, shown, length = overlong or self.overlong, prompt, 0
        limit = limit or Limit(sys.maxsize, "")
        for _ in range(1 + _TRIES):
            features = self._conditioner.encode(shown)
            n = len(features["input_ids"])
            if n <= limit.tokens:
                if shown is not prompt:
                    if len(self._cut) >= MOST_CUT:
                        self._cut.clear()
                    self._cut[key_of(prompt)] = shown.text
                return shown, features
            length = length or n
            wanted = self._tokens(shown.text) - (n - limit.tokens) if how == "cut" else 0
            if wanted < 1:
                break
            shown = replace(shown, text=self._end_of(shown, wanted))
        why = f"has {length} tokens{limit.why}"
        if how == "error":
            raise UserError(
                f"data: the prompt {prompt.id} {why}; shorten it or take it out of the data, "
                "raise the limit, or set data.overlong to skip or cut"
            )
        more = ", and too many without its text, too" if how == "cut" else ""
        raise OverlongError(prompt.id, f"it {why}{more} (data.overlong: {how})")

    def shown(self, prompt: Prompt, limit: Limit | None) -> Prompt:
        """The prompt as the model reads it."""
        if self.overlong != "cut":
            return prompt
        text = self._cut.get(key_of(prompt))
        return self.encode(prompt, limit)[0] if text is None else replace(prompt, text=text)

    def _end_of(self, prompt: Prompt, tokens: int) -> str:
        """The longest end of the prompt's text with at most ``tokens`` tokens; placeholders of its media stay."""
        fewest = bisect_left(
            range(len(prompt.text)), -tokens, key=lambda left: -self._tokens(without_first(prompt, left))
        )
        return without_first(prompt, fewest)

    def _tokens(self, text: str) -> int:
        return len(tokenizer_of(self._conditioner.saved)(text, add_special_tokens=False).input_ids)


def without_first(prompt: Prompt, n: int) -> str:
    """The text of ``prompt`` without its first ``n`` characters, not counting placeholders of its media, which stay."""
    if not prompt.media:
        return prompt.text[n:]
    kept, at = "", 0
    for found in PLACEHOLDER.finditer(prompt.text):
        text = prompt.text[at : found.start()]
        kept, n, at = kept + text[n:] + found[0], max(0, n - len(text)), found.end()
    return kept + prompt.text[at:][n:]
