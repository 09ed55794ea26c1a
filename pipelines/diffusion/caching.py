"""The cache key of a prompt's embeddings: everything they depend on besides the prompt."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.config.schema import Recipe
from mmrl.controller.feature_cache import FeatureCache, digest_of
from mmrl.core.json_types import JsonObject

from .adapter import Adapter

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedTokenizerBase


def cache_of(adapter: Adapter, recipe: Recipe) -> FeatureCache | None:
    """The cache on disk that the recipe asks for. Raises ``UserError`` where there can be no such folder."""
    if recipe.features.cache is None:
        return None
    return FeatureCache(Path(recipe.features.cache).expanduser(), identity_of(adapter))


def identity_of(adapter: Adapter) -> str:
    """A digest of all that encoding reads: the encoders' weights (all bits of them) and configurations, the tokenizers,
    the adapter's own file and those it builds on, the settings of sampling that shape features, the kind of device, and
    the libraries' versions. Call it before the first prompt is encoded: tokenizers keep what they were asked last.
    """
    found = hashlib.sha256()
    for part in _parts(adapter):
        found.update(f"{len(part)} {part}".encode())
    return found.hexdigest()[:32]


def _parts(adapter: Adapter) -> Iterator[str]:
    pipe, sampling = adapter.pipe, adapter.sampling
    for kind in type(adapter).__mro__:
        if issubclass(kind, Adapter):
            yield hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    yield " ".join(importlib.metadata.version(name) for name in ("torch", "transformers", "diffusers"))
    # of all settings of sampling those that a family may encode with; the others may change from run to run
    yield f"{sampling.height} {sampling.width} {sampling.frames} {sampling.max_sequence_length} {adapter.source_size}"
    yield f"{adapter.family} {adapter.negative!r} {adapter.device.type} {sampling.image_crf}"
    yield _as_text(dict(pipe.config))
    for encoder in (
        *adapter.text_encoders,
        *([adapter.vae] if adapter.edits else []),
    ):  # encodes the picture that is edited
        config: Any = encoder.config
        yield type(encoder).__name__
        yield _as_text(config.to_dict() if hasattr(config, "to_dict") else dict(config))
        yield str(getattr(config, "_attn_implementation", None))
        for name, tensor in (*encoder.named_parameters(), *encoder.named_buffers()):
            yield digest_of(name, {"": tensor})
    for name in (*map(adapter.tokenizer_of, adapter.encoders), *([adapter.sees] if adapter.sees else [])):
        if getattr(pipe, name, None) is not None:
            yield from _files(getattr(pipe, name))


def _as_text(config: JsonObject) -> str:
    """A configuration without the place that it was read from."""
    return json.dumps({k: v for k, v in config.items() if not k.startswith("_")}, sort_keys=True, default=str)


def _files(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """The names and digests of the files that ``tokenizer`` is saved as."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file():
                yield f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}"
