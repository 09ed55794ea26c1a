"""Make the samples that rewards see from decoded pictures."""

from __future__ import annotations

from collections.abc import Collection

import torch
from PIL import Image
from torch import Tensor

from mmrl.core.trajectory import Rows, Sample


def make_samples(rows: Rows, images: Tensor, inputs: Collection[str]) -> list[Sample]:
    """One sample per row of ``images`` ``[B, 3, H, W]``, or clips ``[B, F, 3, H, W]``, in [0, 1], with the inputs its
    rewards declared, no others."""
    clips = images.ndim == 5
    pictures = to_pil(images.detach()) if "image" in inputs and not clips else [None] * len(rows)
    videos = [tuple(to_pil(v.detach())) for v in images] if "video" in inputs and clips else [None] * len(rows)
    return [
        Sample(
            prompt=slot.prompt,
            id=sample_id,
            image=picture,
            video=video,
            tensor=images[i] if "tensor" in inputs else None,
        )
        for i, (slot, sample_id, picture, video) in enumerate(zip(rows.slots, rows.ids, pictures, videos, strict=True))
    ]


def to_pil(images: Tensor) -> list[Image.Image]:
    """RGB pictures of ``[B, 3, H, W]`` in [0, 1]."""
    pixels = (images.float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(p) for p in pixels]
