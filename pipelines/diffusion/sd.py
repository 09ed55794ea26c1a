"""Stable Diffusion 1 and 2 (``StableDiffusionPipeline``), sampled with DDIM."""

from __future__ import annotations

from torch import Tensor

from . import loading
from .unet import UNetAdapter


class SDAdapter(UNetAdapter):
    """Final class."""

    family = "Stable Diffusion 1 or 2"
    pipeline = "StableDiffusionPipeline"
    encoders = ("text_encoder",)
    unused = ("safety_checker", "feature_extractor", "image_encoder")
    options = {"requires_safety_checker": False}  # noqa: RUF012

    def encode(self, text: str) -> dict[str, Tensor]:
        embeds, _ = self.pipe.encode_prompt(text, self.text_encoders[0].device, 1, do_classifier_free_guidance=False)
        return {"embeds": embeds[0].to(self.device)}


build, describe = loading.entry_points(SDAdapter)
