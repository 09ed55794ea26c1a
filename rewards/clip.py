"""CLIP similarity of picture and prompt, through transformers.

``score`` is CLIPScore (Hessel et al. 2021, arXiv 2104.08718): 2.5 * max(cosine, 0). ``pathwise`` is the same without
the clamp, on tensors and with a gradient. ``path`` is a directory or a hub name; only safetensors weights are read.
Weights are float32; ``dtype`` says in what they multiply: ``auto`` is bfloat16 where the device has it. So it is in
the other rewards here that stand on CLIP.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

import mmrl
from mmrl.core.hub_files import check_files
from mmrl.core.library_loading import check_tokens, frozen, refused, try_processor
from mmrl.core.reward_contract import Context, weights_at
from mmrl.core.trajectory import Sample
from mmrl.rewards.sleeping import Sleeping, check_dtype, multiplying, single

DEFAULT = "openai/clip-vit-large-patch14"
WEIGHT = 2.5


@mmrl.reward(device=True, paths=("path",), models=weights_at(DEFAULT), checks=True)
class ClipScore(Sleeping):
    """CLIPScore of each picture with its prompt, 0 to 2.5. Prompts are cut at the text encoder's length."""

    def __init__(self, path: str = DEFAULT, dtype: str = "auto") -> None:
        self.dtype = check_dtype(dtype)
        self.model, self.processor = self.kept(partial(load_clip, path, path))

    def score(self, samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
        """``[B]``."""
        self.wake(context.device)
        pixels = self.processor.image_processor([s.image for s in samples], return_tensors="pt")["pixel_values"]
        return WEIGHT * cosine(self.model, self.processor, samples, pixels, context, self.dtype).clamp(min=0)


@mmrl.reward(inputs=("tensor",), differentiable=True, paths=("path",), checks=True)
class PathwiseClip(ClipScore):
    """2.5 * cosine, with the gradient to ``sample.tensor``: pictures are resized on the way by torch (bicubic)."""

    def score(self, samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
        """``[B]``, with a graph."""
        self.wake(context.device)
        pixels = resized(samples, self.model.config.vision_config.image_size, self.processor.image_processor)
        return WEIGHT * cosine(self.model, self.processor, samples, pixels, context, self.dtype)


score = ClipScore
pathwise = PathwiseClip


def load_clip(path: str, processor: str, option: str = "path") -> tuple[Any, Any]:
    """A CLIP model (frozen, float32, on the CPU) and its processor. Raises ``UserError``, which names ``option``."""
    from transformers import CLIPModel, CLIPProcessor

    for folder in (path, processor):
        check_files(folder)
    mmrl.before_loading()
    with no_model(path if path == processor else f"{path} (processor {processor})", option):
        model = frozen(CLIPModel, path, dtype=torch.float32)
        reader = CLIPProcessor.from_pretrained(processor)
        try_processor(reader)
        check_tokens(reader.tokenizer, model.config)
        return model, reader


def no_model(where: str, option: str) -> AbstractContextManager[None]:
    """Raises ``UserError`` where no CLIP model can be loaded."""
    return refused(
        lambda reason: (
            f"cannot load a CLIP model from {where}: {reason}; set the reward's options.{option} "
            "to a directory that save_pretrained wrote, or to a hub name while online"
        )
    )


def resized(samples: Sequence[Sample], size: int, images: Any) -> torch.Tensor:
    """What the image processor ``images`` makes of pictures, ``[B, 3, size, size]``, with the gradient to them.

    The shorter edge is resized to ``size`` by torch (bicubic, antialiased) and the middle kept.
    """
    pictures = torch.stack([sample.tensor for sample in samples if sample.tensor is not None])
    scale = size / min(pictures.shape[-2:])
    height, width = (max(size, round(n * scale)) for n in pictures.shape[-2:])
    pictures = torch.nn.functional.interpolate(pictures, (height, width), mode="bicubic", antialias=True)
    top, left = (height - size) // 2, (width - size) // 2
    return normalised(pictures[:, :, top : top + size, left : left + size].clamp(0, 1), images)


def normalised(pictures: torch.Tensor, images: Any) -> torch.Tensor:
    """``pictures`` ``[..., 3, H, W]`` in [0, 1] by the mean and deviation of the image processor ``images``."""
    mean, std = (torch.tensor(v, device=pictures.device)[:, None, None] for v in (images.image_mean, images.image_std))
    return (pictures - mean) / std


def cosine(
    model: Any, processor: Any, samples: Sequence[Sample], pixels: torch.Tensor, context: Context, dtype: str
) -> torch.Tensor:
    """Cosine ``[B]``, float32, of each picture (normalised ``pixels`` ``[B, 3, H, W]``) with its prompt, by a ``model``
    that is on the device and multiplies in ``dtype``.

    The prompts of a group are equal, so each different one is encoded once.
    """
    texts = list(dict.fromkeys(sample.prompt.text for sample in samples))
    tokens = processor.tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(context.device)
    with multiplying(dtype, context.device):
        found = model(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            pixel_values=pixels.to(context.device),
        )
    rows = torch.tensor([texts.index(sample.prompt.text) for sample in samples], device=context.device)
    return torch.nn.functional.cosine_similarity(single(found.image_embeds), single(found.text_embeds)[rows], dim=-1)
