"""Prompts with more tokens than the text encoders read, and what ``data.overlong`` does with them.

Of several encoders the one that reads most decides: what the others cut, it still reads. A negative prompt that is used
counts as a part of its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, UserError, first_of
from mmrl.core.hub_files import json_of
from mmrl.core.json_types import as_list
from mmrl.core.trajectory import Prompt

from .adapter import Adapter, Read
from .negative import Negatives

_NAMED = 5
"""How many prompts a message names."""


class PromptLengths:
    """Final class. ``tokenizers`` by the text encoder's name; without them nothing is known, and nothing refused."""

    def __init__(self, negatives: Negatives, recipe: Recipe, tokenizers: Mapping[str, Any]) -> None:
        self.adapter, self.how, self._tokenizers = negatives.adapter, recipe.overlong, tokenizers
        self._negatives = negatives

    def of(self, prompt: Prompt) -> Read | None:
        """The tokens of ``prompt`` for the encoder that reads most, and how many it reads; None where that is not
        known."""
        return _deciding(self.adapter.read(prompt.text, self._tokenizers)) if self._tokenizers else None

    def check(self, prompt: Prompt) -> None:
        """Raises ``BadPromptError``, or ``UserError`` with ``data.overlong: error``, where ``prompt`` is too long."""
        if self.how == "cut" or (why := self.why(prompt)) is None:
            return
        if self.how == "error":
            raise UserError(f"data: the prompt {prompt.id} {why}; {_EDIT}")
        raise BadPromptError(prompt.id, f"it {why} (data.overlong: skip)")

    def why(self, prompt: Prompt) -> str | None:
        """Why ``prompt``, or its negative prompt, is too long; None where neither is."""
        found, away = [("", self.of(prompt))], self._negatives.given(prompt)
        if away is not None and self._negatives.used and self._tokenizers:
            found.append(("a negative prompt of ", _deciding(self.adapter.read_negative(away, self._tokenizers))))
        for what, read in found:
            if read is not None and read.tokens > read.most:
                return f"has {what}{read.tokens} tokens, and {self.adapter.family}'s text encoder reads {read.most}"
        return None

    def said_of(self, prompts: Sequence[Prompt]) -> list[str]:
        """Notes on those of ``prompts`` that are too long. Raises ``UserError`` where none may be, or where all are and
        are left out."""
        found = [(prompt, why) for prompt in prompts if (why := self.why(prompt)) is not None]
        if not found:
            return []
        names = first_of([prompt.id for prompt, _ in found], _NAMED)
        said = f"{len(found)} of {len(prompts)} prompts looked at are too long ({names}): the first {found[0][1]}"
        if self.how == "error":
            raise UserError(f"data: {said}; {_EDIT}")
        if self.how == "cut":
            return [f"{said}: what comes after is not read (data.overlong: cut)"]
        if len(found) == len(prompts):
            raise UserError(f"data: {said}; {_EDIT}")
        return [f"{said}: they are left out (data.overlong: skip)"]


_EDIT = (
    "shorten such prompts or take them out of the data, raise sampling.max_sequence_length where the family has it, or "
    "set data.overlong=cut to train on their beginnings"
)


def _deciding(reads: Sequence[Read]) -> Read | None:
    return max(reads, key=lambda one: (one.most, -one.tokens), default=None)


def of_pipe(adapter: Adapter) -> dict[str, Any]:
    """The tokenizers of a loaded pipeline."""
    named = {name: getattr(adapter.pipe, adapter.tokenizer_of(name), None) for name in readers(adapter)}
    return {name: one for name, one in named.items() if hasattr(getattr(one, "tokenizer", one), "vocab_size")}


def of_checkpoint(adapter: Adapter, path: str) -> dict[str, Any]:
    """The tokenizers of a checkpoint, without its weights; empty where they cannot be read here."""
    made: dict[str, Any] = {}
    try:
        index = json_of(path, "model_index.json")
        for name in readers(adapter):
            tokenizer = adapter.tokenizer_of(name)
            library, kind = as_list(index.get(tokenizer) or [None, None])
            if kind is not None:
                loaded = getattr(import_module(str(library)), str(kind))
                made[name] = loaded.from_pretrained(path, subfolder=tokenizer, local_files_only=True)
    except Exception:  # a tokenizer's parser in Rust has no narrower class; loading will name it
        return {}
    return made


def readers(family: Adapter | type[Adapter]) -> list[str]:
    """The encoders of text."""
    return [name for name in family.encoders if name.startswith("text_encoder")]
