"""Encode a picture once for all rows of a batch that contain it: the samples of a group share their prompt.

The features of a row are equal to the bit, unless a kernel of the vision tower rounds differently for fewer pictures in
a call. Sampling and replay do the same. If the vision tower trains, the gradients of the rows add up in its output.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from mmrl.core.transfer import picked
from mmrl.models.text.base_model import base_model

T = TypeVar("T")

MEDIA = {
    "get_image_features": ("pixel_values", "image_grid_thw"),
    "get_video_features": ("pixel_values_videos", "video_grid_thw"),
}
"""Methods of transformers' models, with the feature that they encode and the one with a row per picture or clip."""


class _Encoded(Protocol):
    """transformers' ``BaseModelOutputWithPooling``: the features of each picture."""

    pooler_output: Tensor | Sequence[Tensor] | None
    deepstack_features: Sequence[Tensor | Sequence[Tensor]] | None
    """By layer; only Qwen3-VL has them."""


class Shared:
    """Has a model encode each picture of a batch once. Where this is not possible, the model encodes all rows.

    A copy of the model does the same. ``expected`` announces the next batch; one thread at a time.
    """

    def __init__(self, policy: nn.Module) -> None:
        model = base_model(policy).base_model
        self._keys: Sequence[str] = ()
        self._rows: list[dict[str, torch.Size]] = []
        self._joined: dict[str, weakref.ref[Tensor]] = {}
        self._turn = threading.local()
        for name in MEDIA:
            if plain := getattr(type(model), name, None):
                setattr(model, name, MethodType(self._encoding(name, plain), model))

    def expected(
        self, keys: Sequence[str], rows: Sequence[Mapping[str, Tensor]], joined: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Announce ``joined``, the arguments of the next call of the model, made from ``rows``; returns it. Rows with
        one key are equal."""
        self._keys = keys
        self._rows = [{name: tensor.shape for name, tensor in row.items()} for row in rows]
        pixels = (pixels for pixels, _ in MEDIA.values() if pixels in joined)
        self._joined = {name: weakref.ref(joined[name]) for name in pixels}
        return joined

    def _encoding(self, method: str, plain: Callable[..., _Encoded]) -> Callable[..., _Encoded]:
        pixels, grid = MEDIA[method]

        @functools.wraps(plain)
        def encode(model: nn.Module, *given: Tensor, **named: Tensor | bool | None) -> _Encoded:
            names = (pixels, grid if grid in self._features() else "pixel_attention_mask")
            asked = {**dict(zip(names, given, strict=False)), **named}
            with_media = [n for n, row in enumerate(self._rows) if pixels in row]
            first = {self._keys[n]: n for n in reversed(with_media)}
            if not self._fits(asked, pixels) or len(first) == len(with_media):
                return plain(model, *given, **named)
            chosen = sorted(first.values())
            self._turn.busy = True  # a clip may be encoded as a picture is
            try:
                out = plain(model, **{name: self._cut(name, value, chosen) for name, value in asked.items()})
            finally:
                self._turn.busy = False
            counts = [self._count(n, pixels, grid) for n in chosen]
            starts = dict(zip(chosen, [sum(counts[:i]) for i in range(len(counts))], strict=True))
            of = [(first[self._keys[n]], self._count(n, pixels, grid)) for n in with_media]
            places = [starts[n] + i for n, count in of for i in range(count)]
            return _repeated(out, places, sum(counts)) or plain(model, *given, **named)

        return encode

    def _features(self) -> set[str]:
        return {name for row in self._rows for name in row}

    def _fits(self, asked: Mapping[str, Tensor | bool | None], pixels: str) -> bool:
        """Whether the model is called with the announced tensors and no other tensors of pictures."""
        announced = self._joined.get(pixels, lambda: None)()
        tensors = {name for name, value in asked.items() if isinstance(value, Tensor)}
        same = announced is not None and announced is asked.get(pixels)
        return same and not getattr(self._turn, "busy", False) and tensors <= self._features()

    def _cut(self, name: str, value: T, chosen: Sequence[int]) -> T | Tensor:
        """The part of ``value`` that belongs to the rows ``chosen``."""
        if not isinstance(value, Tensor):
            return value
        having = [n for n, row in enumerate(self._rows) if name in row]
        parts = dict(zip(having, value.split([self._rows[n][name][0] for n in having]), strict=True))
        return torch.cat([parts[n] for n in chosen])

    def _count(self, n: int, pixels: str, grid: str) -> int:
        """How many pictures, or clips, a row has."""
        row = self._rows[n]
        return row[grid][0] if grid in row else row[pixels][0] * row[pixels][1]


def _repeated(out: _Encoded, places: Sequence[int], total: int) -> _Encoded | None:
    """``out`` with the features of each of ``total`` pictures repeated at ``places``; None if its layout is
    unknown."""
    pooled = getattr(out, "pooler_output", None)
    if pooled is None or len(pooled) != total:
        return None
    deep = getattr(out, "deepstack_features", None)
    if deep is not None and any(len(layer) != total for layer in deep):
        return None
    out.pooler_output = _at(pooled, places)
    if deep is not None:
        out.deepstack_features = [_at(layer, places) for layer in deep]
    return out


def _at(each: Tensor | Sequence[Tensor], places: Sequence[int]) -> Tensor | tuple[Tensor, ...]:
    return picked(each, places) if isinstance(each, Tensor) else tuple(each[place] for place in places)
