"""Qwen-Image-Edit-Plus (``QwenImageEditPlusPipeline``; 2509, 2511): an edit instruction and one picture or several."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image
from torch import Tensor

from . import loading
from .qwen_image_edit import QwenImageEditAdapter


class QwenImageEditPlusAdapter(QwenImageEditAdapter):
    """Final class. Every prompt carries ``sampling.pictures`` pictures, each as Qwen-Image-Edit has its one; the text
    encoder sees them smaller, with an area of 384 x 384, as in the stock pipeline."""

    family = "Qwen-Image-Edit-Plus"
    pipeline = "QwenImageEditPlusPipeline"
    several = True

    def _prepared(self, area: str) -> str:
        return (
            "from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus\n\n"
            f"pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE = {area}\n"
        )

    def _asked(self, text: str) -> str:
        stands = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"  # the stock pipeline's own
        return "".join(stands.format(n + 1) for n in range(self.pictures)) + text

    def encode_seen(self, text: str, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        return super().encode_seen(text, [self._small(one) for one in pictures])

    def _small(self, picture: Image.Image) -> Image.Image:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock

        width, height = stock.calculate_dimensions(stock.CONDITION_IMAGE_SIZE, picture.width / picture.height)
        return self.pipe.image_processor.resize(picture, height, width)


build, describe = loading.entry_points(QwenImageEditPlusAdapter)
