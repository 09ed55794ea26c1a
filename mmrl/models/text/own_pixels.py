"""Resize pictures and frames of clips whose record says itself how many pixels they have.

The sizes are those of Qwen's own tools: multiples of a patch, with as many pixels as ``min_pixels`` and ``max_pixels``
allow. The processor then takes the pictures as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from PIL import Image

from mmrl.core.media import Media, Show


class Size(Protocol):
    """transformers' ``SizeDict`` of a processor that limits the number of pixels."""

    shortest_edge: int
    longest_edge: int

    def __init__(self, *, shortest_edge: int, longest_edge: int) -> None: ...


class PixelProcessor(Protocol):
    """A processor of pictures or clips of transformers."""

    size: Size
    patch_size: int
    merge_size: int


def own_pixels(media: Sequence[Media], kind: str, processor: PixelProcessor | None) -> bool:
    """Whether the record says how many pixels its ``media`` of a ``kind`` have. Raises ``ValueError`` where
    ``processor`` has no such limits, and where some clips of a record say it and others do not."""
    said = [_said(medium.show) for medium in media if medium.kind == kind]
    if not any(said):
        return False
    size = getattr(processor, "size", None)
    edges = [getattr(size, name, None) for name in ("shortest_edge", "longest_edge")]
    if not all(edges) or not hasattr(processor, "merge_size"):
        raise ValueError(f"{type(processor).__name__} limits no number of pixels; remove them")
    if kind == "video" and not all(said):
        raise ValueError("some of its clips have them and others do not; give them to all its clips, or to none")
    return True


def resized(frames: Sequence[Image.Image], processor: PixelProcessor | None, show: Show | None) -> list[Image.Image]:
    """``frames`` with as many pixels as ``show`` allows, or ``processor`` where it says nothing. Raises ``ValueError``
    for pictures that are far too narrow."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    assert processor is not None
    show = show or Show()
    low = show.min_pixels or min(int(processor.size.shortest_edge), show.max_pixels or 2**62)
    high = show.max_pixels or max(int(processor.size.longest_edge), low)
    width, height = frames[0].size
    factor = processor.patch_size * processor.merge_size
    tall, wide = smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high)
    return [frame.resize((wide, tall), Image.Resampling.BICUBIC) for frame in frames]


def _said(show: Show | None) -> bool:
    return show is not None and (show.min_pixels is not None or show.max_pixels is not None)
