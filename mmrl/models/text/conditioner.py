"""The parts of transformers' tokenizers and processors that mmrl uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Literal, Protocol, TypedDict, TypeVar, overload, runtime_checkable

from PIL.Image import Image
from torch import Tensor

from mmrl.core.json_types import Json

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
