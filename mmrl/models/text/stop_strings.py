"""End responses where a stop string appears, and where a prompt's own limit is reached.

A response ends with the token that completes a stop string, and that token is trained on, as in Hugging Face's
``generate`` and in vLLM. The text keeps the stop string, since its tokens are part of the response (TRL decodes
them too; vLLM's own text lacks it), and loses what the last token has behind it. Of the first ``least`` tokens none
completes a stop string, which is vLLM's rule for ``min_tokens``.

The same code looks at tokens of every engine, so that a stop string ends a response that was drawn in parts too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.rollout_engine import Completion, Request
from mmrl.core.transfer import to_device
from mmrl.models.text.chat import Conditioner
from mmrl.models.text.conditioner import tokenizer_of

_SPARE = 4
"""Tokens that are looked at beyond the bytes of the longest stop string: a character has up to four."""
_UNFINISHED = "\ufffd"
"""What the first bytes of a character are decoded to."""


class StopStrings:
    """Final class. ``hidden`` tokens have no text. No stop strings: nothing ends."""

    def __init__(
        self, strings: Sequence[str], least: int, decode: Callable[[Sequence[int]], str], hidden: Collection[int]
    ) -> None:
        self.strings, self.least = list(strings), least
        self._decode, self._hidden = decode, frozenset(hidden)
        self._most = max((len(text.encode()) for text in strings), default=0) + _SPARE

    @property
    def window(self) -> int:
        """The last tokens of a response that ``complete`` looks at."""
        return 2 * self._most

    def complete(self, tokens: Sequence[int], count: int | None = None) -> bool:
        """Whether the last of ``tokens`` completes a stop string; they are the end of a response of ``count``."""
        count = len(tokens) if count is None else count
        if not self.strings or count <= self.least or not tokens or tokens[-1] in self._hidden:
            return False
        shown = [token for token in tokens[-self.window :] if token not in self._hidden][-self._most :]
        return self._end(self._decode(shown), self._decode(shown[:-1])) is not None

    def length(self, tokens: Sequence[int], begin: int = 0) -> int | None:
        """How many ``tokens`` a response has that ends with a stop string, none of them in the first ``begin``."""
        if not self.strings:
            return None
        first = max(begin, self.least) + 1
        return next(
            (n for n in range(first, len(tokens) + 1) if self.complete(tokens[max(0, n - self.window) : n], n)), None
        )

    def text(self, tokens: Sequence[int]) -> str:
        """The text of a response; where its last token completes a stop string, up to there."""
        text = self._decode(tokens)
        if not self.complete(tokens):
            return text
        end = self._end(text, self._decode(tokens[:-1]))
        return text if end is None else text[:end]

    def ended(self, made: Completion, request: Request) -> Completion:
        """What an engine drew behind ``request.partial``, up to where a stop string or the prompt's limit ends it."""
        done = list(request.partial)
        limit = len(made.token_ids) if request.max_new_tokens is None else max(request.max_new_tokens - len(done), 0)
        if limit < len(made.token_ids):
            made = replace(made, token_ids=made.token_ids[:limit], log_probs=made.log_probs[:limit], finish="length")
        whole = self.length([*done, *made.token_ids], len(done))
        if whole is None:
            return made
        n = whole - len(done)
        return replace(made, token_ids=made.token_ids[:n], log_probs=made.log_probs[:n], finish="stop")

    def _end(self, text: str, before: str) -> int | None:
        """Where the first stop string ends in ``text`` that does so behind ``before``, the text one token earlier."""
        known = len(before.rstrip(_UNFINISHED))
        found = [(text.find(stop, max(0, known - len(stop) + 1)), len(stop)) for stop in self.strings]
        return min((at + size for at, size in found if at >= 0), default=None)


class Ends:
    """Final class: a stopping criterion of ``generate``. ``limits``: tokens that each row may have; ``prompt``: tokens
    before them."""

    def __init__(self, stops: StopStrings, limits: Sequence[int], prompt: int) -> None:
        self._stops, self._prompt = stops, prompt
        self.lengths = list(limits)
        self.stopped = [False] * len(limits)
        """Rows that a stop string ended."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        """Which rows have ended, ``[B]``."""
        n = input_ids.shape[1] - self._prompt
        if self._stops.strings:
            ends = input_ids[:, max(self._prompt, input_ids.shape[1] - self._stops.window) :].tolist()
            for i, tokens in enumerate(ends):
                if n <= self.lengths[i] and not self.stopped[i] and self._stops.complete(tokens, n):
                    self.lengths[i], self.stopped[i] = n, True
        return to_device(torch.tensor([n >= length for length in self.lengths]), input_ids.device)

    def inside(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which of ``tokens`` ``[B, T]`` belong to responses, and which rows ``[B]`` a stop string ended."""
        lengths = to_device(torch.tensor(self.lengths), tokens.device).unsqueeze(1)
        stopped = to_device(torch.tensor(self.stopped), tokens.device)
        return torch.arange(tokens.shape[1], device=tokens.device) < lengths, stopped


def stops_of(strings: Sequence[str], least: int, conditioner: Conditioner) -> StopStrings:
    """The stop strings of a recipe, for responses of the model of ``conditioner``."""
    hidden = tokenizer_of(conditioner.saved).all_special_ids if strings else ()
    return StopStrings(strings, least, lambda tokens: conditioner.decode(tokens), hidden)


def check_strings(strings: Sequence[str], conditioner: Conditioner) -> None:
    """Raise ``UserError`` where tokens of the model make no text with one of ``strings`` in it."""
    tokenizer = tokenizer_of(conditioner.saved)
    for text in strings:
        written = [tokenizer(before + text, add_special_tokens=False).input_ids for before in ("", "a")]
        if any(text in conditioner.decode(tokens) for tokens in written):
            continue
        special = [name for name in tokenizer.all_special_tokens if name in text]
        why = f"{special[0]} is a control token, which has no text" if special else "its tokens make another text"
        raise UserError(
            f"sampling.stop: no response can have {text!r} in its text: {why}; take it out, or write what the model "
            "writes (tokens that end a response do so without sampling.stop)"
        )
