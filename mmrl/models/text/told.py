"""What a policy is told after a turn of its own, as tokens: the chat template's, behind what was sampled.

No text that was sampled is rendered again. The template renders a short conversation, with a mark in place of the
answer; what it writes behind the mark is what follows every answer. Its own pieces become control tokens, and the
content of a message becomes text whatever it spells.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from PIL.Image import Image
from torch import Tensor

from mmrl.core.json_types import JsonObject
from mmrl.core.media import Media
from mmrl.models.text.conditioner import Messages, Processor, Tokenizer
from mmrl.models.text.features import PER_TOKEN
from mmrl.models.text.template_probe import TemplateFaultError, render

Contents: TypeAlias = "Sequence[str | Sequence[str | Media]]"
"""What each message shows: a text, or texts and pictures."""
Role: TypeAlias = Literal["user", "tool"]
"""Whose messages they are."""


@dataclass(frozen=True)
class Told:
    """Messages behind an answer. ``tokens``: with every picture's placeholder expanded; ``unexpanded``: with one each.
    ``features``: of the pictures, as the processor makes them, and per token; empty without pictures. ``key`` names
    them in a feature store."""

    tokens: list[int]
    unexpanded: list[int]
    images: Sequence[Image] = ()
    features: Mapping[str, Tensor] = field(default_factory=dict)
    key: str | None = None

    def behind(self, written: Sequence[int], stop: Sequence[int]) -> Told:
        """Without the token that ends the turn, where it was sampled: the policy ended its turn itself."""
        if not (self.tokens and written and self.tokens[0] in stop and written[-1] in stop):
            return self
        features = {name: of[1:] if name in PER_TOKEN else of for name, of in self.features.items()}
        return replace(self, tokens=self.tokens[1:], unexpanded=self.unexpanded[1:], features=features)

    def without(self, last: int) -> Told:
        """Without its ``last`` tokens, which are of no picture; the key says so."""
        if not last:
            return self
        features = {name: of[:-last] if name in PER_TOKEN else of for name, of in self.features.items()}
        key = self.key and f"{self.key}{_WITHOUT}{last}"
        return Told(self.tokens[:-last], self.unexpanded[:-last], self.images, features, key)


_WITHOUT = " less "


def whole_key(key: str) -> tuple[str, int]:
    """The key of a ``Told`` before ``without``, and the tokens that it lost."""
    whole, _, last = key.partition(_WITHOUT)
    return whole, int(last or 0)


def pictures_of(contents: Contents) -> list[Media]:
    """Those of all messages, in order."""
    return [part for content in contents for part in content if isinstance(part, Media)]


def key_of_told(role: str, contents: Contents) -> str:
    """Names the features of the pictures of messages: equal for equal messages."""
    made = hashlib.blake2b(role.encode(), digest_size=12)
    for n, content in enumerate(contents):
        for part in [content] if isinstance(content, str) else content:
            data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else repr(part.path).encode()
            of = part.data or b"" if isinstance(part, Media) else b""
            made.update(f"{n} {type(part).__name__} {len(data)} {len(of)} ".encode() + data + of)
    return made.hexdigest()


def behind_an_answer(
    saved: Tokenizer | Processor, variables: JsonObject, messages: Messages, *, asks: bool = True
) -> str:
    """What the chat template writes behind an answer for ``messages``, up to where the next answer begins; it begins
    with what ends a turn. Not ``asks``: without what the template writes before an answer. Raises
    ``TemplateFaultError`` where it does not show such messages."""
    texts = " ".join(str(message.get("content")) for message in messages)
    mark = next(text for n in itertools.count() if (text := f"Q{n}MARKQ") not in texts)
    lists = any(not isinstance(message.get("content"), str) for message in messages)
    asked, wrote = ([{"type": "text", "text": text}] if lists else text for text in ("d", mark))
    said: list[JsonObject] = [{"role": "user", "content": asked}, {"role": "assistant", "content": wrote}]
    shown = render(saved, [*said, *messages], variables, asks=asks)
    if shown.count(mark) != 1:
        raise TemplateFaultError("the chat template does not show an answer before them once", shown)
    return shown.partition(mark)[2]
