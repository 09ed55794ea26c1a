"""Load a stranger's checkpoint with a library: whatever its files hold, a refusal, and readers that are tried once."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mmrl.core.errors import UserError
from mmrl.core.tensor_files import header
from mmrl.core.whole_weights import whole_weights

_TIMES, _SMALL = 3, 50_000_000
"""A model may have so many times as many numbers as its files (two weights of 4 bits are stored as one), or so many."""
_SIDE = 32
"""Pixels of a side of the picture that a processor is tried with."""


@contextmanager
def refused(say: Callable[[str], str]) -> Generator[None]:
    """Raise ``UserError`` with ``say(reason)``, where ``reason`` is one line, for whatever a library raises inside the
    block: odd values in a checkpoint's files meet any line of it, and the parsers of tokenizers have no narrower class.

    A ``UserError`` passes as it is, and so does a device without memory.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(say(one_line(error))) from error


def one_line(error: Exception) -> str:
    """The first line of what was said; with its class where that alone says little."""
    said = (str(error).strip().splitlines() or [""])[0]
    kind = type(error).__name__
    return f"{kind}: {said}" if said and isinstance(error, LookupError) else said or kind


def check_size(kind: Any, path: str) -> None:
    """Compare the model of the class ``kind`` that the config.json in the folder ``path`` describes with the weights in
    the folder: a library would make the whole model first, with random weights, and then miss its own. Raises
    ``UserError`` where it is far larger, and whatever the library raises."""
    from transformers import AutoConfig

    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        return
    stored = sum(math.prod(one.shape) for file in files for one in header(file).values())
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    described = sum(p.numel() for p in model.parameters())
    if described > max(_TIMES * stored, _SMALL):
        raise UserError(
            f"{path}: its config.json describes a model of {described:,} weights, and its files hold {stored:,}; "
            "download it or save it anew"
        )


def frozen(kind: Any, path: str, unused: tuple[str, ...] = (), **options: Any) -> Any:
    """The model of transformers' class ``kind`` at ``path``, with nothing to train, from safetensors alone.

    ``unused``: as of ``whole_weights``; ``options``: of ``from_pretrained``. Raises as ``check_size`` and
    ``whole_weights`` do, and whatever the library raises.
    """
    check_size(kind, path)
    with whole_weights(path, unused):
        return kind.from_pretrained(path, use_safetensors=True, **options).eval().requires_grad_(False)


def try_tokenizer(tokenizer: Any, file: str = "tokenizer_config.json") -> None:
    """Read a text and write it, as steps will: a tokenizer is loaded with settings that it fails on later. Raises what
    it raises, and ``ValueError`` for a length that is no number of tokens; ``file`` names where it is set."""
    if tokenizer is None:
        return
    most = getattr(tokenizer, "model_max_length", 1)
    if isinstance(most, bool) or not isinstance(most, int | float) or not most >= 1 or math.isinf(most):
        raise ValueError(f"{file}: model_max_length is {most!r}, which is no number of tokens")
    tokenizer.model_max_length = int(most)
    if not {*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids}:
        raise ValueError(f"{file}: the files beside it have no vocabulary; download them again")
    tokenizer("a", truncation=True, max_length=min(int(most), 8))
    ids = tokenizer("a", add_special_tokens=False).input_ids  # last: its parser keeps the truncation of a call
    tokenizer.decode(ids, skip_special_tokens=True)
    for token in (tokenizer.eos_token_id, tokenizer.pad_token_id, *tokenizer.all_special_ids):
        if token is not None and not isinstance(token, int):
            raise ValueError(f"{file}: the special token {token!r} is no token of the vocabulary")


def check_tokens(tokenizer: Any, config: Any) -> None:
    """Raise ``ValueError`` where ``tokenizer`` makes tokens that a model with ``config`` has no embedding for: a device
    would end the process. Added tokens that no text makes may be beyond it, as Gemma 3's for pictures are."""
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if tokenizer is None or not isinstance(rows, int):
        return
    used = {*tokenizer("a").input_ids, tokenizer.pad_token_id, tokenizer.unk_token_id}
    added = getattr(tokenizer, "added_tokens_decoder", {}).keys() - used
    beyond = {i: token for token, i in tokenizer.get_vocab().items() if i >= rows and i not in added}
    if beyond:
        first = min(beyond)
        raise ValueError(
            f"its tokenizer has the token {beyond[first][:40]!r} with the number {first}, and the model has embeddings "
            f"for numbers below {rows}; save both anew, together"
        )


def try_processor(processor: Any) -> None:
    """Read a picture and a text, as steps will. Raises what the processor raises."""
    from PIL import Image

    if (tokenizer := getattr(processor, "tokenizer", None)) is not None:
        try_tokenizer(tokenizer)
    images = getattr(processor, "image_processor", processor)
    images(images=[Image.new("RGB", (_SIDE, _SIDE))], return_tensors="pt")
