"""The protocol of a family of language or vision-language models for the text pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from PIL.Image import Image
from torch import Tensor

from mmrl.media import Clip
from mmrl.trajectory import Prompt


class Conditioner(Protocol):
    """How a family turns prompts into what its model is called with; one small file each."""

    saved: Any
    """The tokenizer or processor, saved beside exported weights."""
    pad_token: int
    stop_tokens: list[int]
    forbidden: list[int]
    """Tokens that stand for media: in a response they would ask the model for pictures that are not there."""
    own_positions: bool
    """The model counts positions itself (multimodal RoPE); otherwise they are counted from the attention mask."""

    def encode(self, prompt: Prompt) -> dict[str, Tensor]:
        """``input_ids`` ``[P]`` and what else the model takes, on the CPU. Raises ``UserError`` for a bad prompt."""
        ...

    def render(self, prompt: Prompt) -> str:
        """The prompt in the model's chat format, one placeholder per medium, up to where its answer begins."""
        ...

    def media(self, prompt: Prompt) -> tuple[list[Image], list[Clip]]:
        """The prompt's decoded pictures and clips."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        ...

    def count(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each of bare ``texts`` has."""
        ...
