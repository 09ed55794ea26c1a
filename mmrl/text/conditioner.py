"""The protocol of a family of language or vision-language models for the text pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Literal, Protocol, TypedDict, TypeVar, overload, runtime_checkable

from PIL.Image import Image
from torch import Tensor

from mmrl.json_types import Json
from mmrl.media import Clip
from mmrl.trajectory import Prompt

if TYPE_CHECKING:  # slow to import
    import numpy as np
    from transformers import AddedToken
    from transformers.video_utils import VideoMetadata

Ids = TypeVar("Ids")
Messages = Sequence[Mapping[str, Json]]
"""A conversation as chat templates take it: ``role`` and ``content``, a text or a list of parts."""


class Tokens(Protocol[Ids]):
    """What a tokenizer returns (transformers' ``BatchEncoding``)."""

    input_ids: Ids


class Tokenizer(Protocol):
    """The part of transformers' ``PreTrainedTokenizerBase`` that mmrl uses."""

    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None
    all_special_ids: list[int]
    all_special_tokens: list[str]
    added_tokens_decoder: Mapping[int, AddedToken]
    bos_token: str | None

    @overload
    def __call__(self, text: str, /, *, add_special_tokens: bool) -> Tokens[list[int]]: ...
    @overload
    def __call__(self, text: list[str], /, *, add_special_tokens: bool) -> Tokens[list[list[int]]]: ...
    def __call__(
        self, text: str | list[str], /, *, add_special_tokens: bool
    ) -> Tokens[list[int]] | Tokens[list[list[int]]]: ...

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, messages: Messages, /, *, tokenize: Literal[False], add_generation_prompt: bool = False, **variables: Json
    ) -> str: ...

    def add_tokens(self, tokens: Sequence[AddedToken], /, *, special_tokens: bool) -> int: ...

    def convert_tokens_to_ids(self, token: str, /) -> int: ...

    def save_pretrained(self, folder: str | PathLike[str], /) -> object: ...


class Given(TypedDict, total=False):
    """Further arguments of a processor for one text."""

    videos: list[list[np.ndarray]]
    video_metadata: list[VideoMetadata]
    do_sample_frames: bool
    add_special_tokens: bool
    """False for a text that begins with its first token already."""
    images_kwargs: dict[str, bool]
    videos_kwargs: dict[str, bool]


@runtime_checkable
class Processor(Protocol):
    """The part of transformers' ``ProcessorMixin`` that mmrl uses."""

    tokenizer: Tokenizer

    def __call__(
        self,
        *,
        text: list[str],
        images: list[list[Image]] | None,
        return_tensors: Literal["pt"],
        videos: list[list[np.ndarray]] = ...,
        video_metadata: list[VideoMetadata] = ...,
        do_sample_frames: bool = ...,
        add_special_tokens: bool = ...,
        images_kwargs: dict[str, bool] = ...,
        videos_kwargs: dict[str, bool] = ...,
    ) -> Mapping[str, Tensor]: ...

    def apply_chat_template(
        self, messages: Messages, /, *, tokenize: Literal[False], add_generation_prompt: bool = False, **variables: Json
    ) -> str: ...

    def save_pretrained(self, folder: str | PathLike[str], /) -> object: ...


def tokenizer_of(saved: Tokenizer | Processor) -> Tokenizer:
    """The tokenizer itself, or that of a processor."""
    return saved.tokenizer if isinstance(saved, Processor) else saved


class Conditioner(Protocol):
    """How a family turns prompts into what its model is called with; one small file each."""

    @property
    def saved(self) -> Tokenizer | Processor:
        """The tokenizer or processor, which an export saves with the weights."""
        ...

    pad_token: int
    stop_tokens: list[int]
    forbidden: list[int]
    """Tokens that stand for media: in a response they would ask the model for pictures that are not there."""
    own_positions: bool
    """The model counts positions itself (multimodal RoPE); otherwise they are counted from the attention mask."""

    def encode(self, prompt: Prompt) -> dict[str, Tensor]:
        """``input_ids`` ``[P]`` and what else the model takes, on the CPU. Raises ``UserError`` for a bad prompt."""
        ...

    def render(self, prompt: Prompt, *, answer: Mapping[str, Json] | None = None, asks: bool = True) -> str:
        """The prompt in the model's chat format, one placeholder per medium, up to where its answer begins; with an
        ``answer``, the message of the assistant, the conversation that ends with it. Not ``asks``: without what the
        template writes before an answer. Control tokens that the prompt's own text spells have a space in them.
        Raises ``BadPromptError``."""
        ...

    def unexpanded(self, prompt: Prompt) -> list[int]:
        """Its tokens with one placeholder per medium."""
        ...

    def spelled(self, prompt: Prompt) -> dict[str, int]:
        """The control tokens that the prompt's own text spells, and how often: they are read as text."""
        ...

    def told(self, role: Literal["user", "tool"], contents: Sequence[str]) -> list[int]:
        """The tokens behind an answer: what ends it, a message for each of ``contents``, and what begins the next
        answer. Raises ``TemplateFaultError`` where the chat template does not show such messages."""
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
