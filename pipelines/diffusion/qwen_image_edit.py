"""Qwen-Image-Edit (``QwenImageEditPipeline``): a picture and an edit instruction, both seen by the text encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from mmrl.config.sampling import Size
from mmrl.core.errors import UserError

from . import loading
from .adapter import Read
from .qwen_image import QwenImageAdapter

_SIDE = 1024
"""Of a square of the stock pipeline's area, in pixels."""
_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 16_384 * 28 * 28}
"""Of the checkpoints' processors, for a plan, which has none."""


class QwenImageEditAdapter(QwenImageAdapter):
    """Every prompt carries one picture. It is cut to the proportions that are sampled, and scaled to the
    area of ``sampling.condition_size`` squared, by default the stock pipeline's 1024 x 1024. The text encoder sees it
    beside the prompt and beside the negative prompt, and its tokens follow those of the picture that is made.

    ``sampling.max_sequence_length`` counts the tokens of text; those of the picture come on top.
    """

    family = "Qwen-Image-Edit"
    pipeline = "QwenImageEditPipeline"
    edits = True
    sees = "processor"
    condition = _SIDE

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        shape = super().latent_shape(height, width)
        if not all(source := _own_size(self._side, Size(height, width))):
            raise UserError(
                f"sampling.condition_size: {self._side} x {self._side} pixels in the proportions of {width} x {height} "
                f"are {source.width} x {source.height} in multiples of 32; raise it to {2 * self._side}"
            )
        return shape

    @property
    def source_size(self) -> Size:
        return _own_size(self._side, self.sampling.size)

    @property
    def _side(self) -> int:
        return self.sampling.condition_size or _SIDE

    @property
    def prepare(self) -> str:
        if self.sampling.condition_size is None:
            return super().prepare
        return super().prepare + self._prepared(f"{self._side} * {self._side}")

    def _prepared(self, area: str) -> str:
        """Python that has the stock pipeline bring a picture to ``area``."""
        return (
            "from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus\n\n"
            "own = pipeline_qwenimage_edit_plus.calculate_dimensions\n"
            f"pipeline_qwenimage_edit.calculate_dimensions = lambda _, ratio: (*own({area}, ratio), None)\n"
        )

    def _asked(self, text: str) -> str:
        """``text`` with what stands for pictures before it, where the template has none of it."""
        return text

    def read(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        found = super().read(self._asked(text), tokenizers)
        return [Read(tokens - self.pictures, most) for tokens, most in found]  # a token of each picture is its own

    def encode(self, text: str) -> dict[str, Tensor]:
        raise TypeError("a prompt of an editor is encoded beside its picture (encode_seen)")

    def encode_seen(self, text: str, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        begins = self.pipe.prompt_template_encode_start_idx
        length = begins + self.sampling.max_sequence_length + sum(self._tokens(*one.size) for one in pictures)
        shown = self._shown(text, pictures)
        for name in ("input_ids", "attention_mask"):
            shown[name] = pad(shown[name], (0, length - shown[name].shape[1]))  # or cut
        return self._features(**shown)

    def _shown(self, text: str, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """What the text encoder is given, as the stock pipeline gives it. In a plan it is text of the same length."""
        if self.pipe.processor is None:
            length = self.pipe.prompt_template_encode_start_idx + self.sampling.max_sequence_length
            ids = torch.zeros(1, length + sum(self._tokens(*one.size) for one in pictures), dtype=torch.long)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        asked = self.pipe.prompt_template_encode.format(self._asked(text))
        made = self.pipe.processor(text=[asked], images=list(pictures), return_tensors="pt")
        return {name: made[name] for name in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")}

    def _tokens(self, width: int, height: int) -> int:
        """How many tokens of the text encoder a picture has."""
        images: Any = getattr(self.pipe.processor, "image_processor", None)
        limits = dict[str, int]()
        if images is None:
            from transformers import Qwen2VLImageProcessorPil  # as slow as the rest of transformers

            images, limits = Qwen2VLImageProcessorPil(), _PIXELS
        patches: int = images.get_number_of_image_patches(height, width, limits)
        return patches // images.merge_size**2


def _own_size(side: int, sampled: Size) -> Size:
    """The size that the stock pipeline brings a picture to, of an area of ``side`` squared, in the proportions of what
    is sampled; it leaves a picture of this size as it is."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    size, before = sampled, None
    while size != before and all(size):  # at most twice, for sides up to 1024 and proportions up to 4 to 1
        before = size
        width, height = calculate_dimensions(side * side, size.width / size.height)
        size = Size(height, width)
    return size


build, describe = loading.entry_points(QwenImageEditAdapter)
