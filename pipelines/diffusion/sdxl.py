"""Stable Diffusion XL (``StableDiffusionXLPipeline``), sampled with DDIM."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mmrl.config.schema import Recipe
from mmrl.pipelines.description import Description

from . import loading
from .adapter import Conditions
from .flow import FlowPipeline
from .unet import UNetAdapter


class SDXLAdapter(UNetAdapter):
    """Final class. The sizes that the model is told of are those of the picture: nothing scaled, nothing cropped."""

    family = "Stable Diffusion XL"
    pipeline = "StableDiffusionXLPipeline"
    encoders = ("text_encoder", "text_encoder_2")
    unused = ("feature_extractor", "image_encoder")
    options = {"add_watermarker": False}  # noqa: RUF012

    def encode(self, text: str) -> dict[str, Tensor]:
        found = self.encode_negative(text)
        if text == self.negative and self.pipe.config["force_zeros_for_empty_prompt"]:  # as where no prompt was given
            found |= {name: torch.zeros_like(found[name]) for name in ("embeds", "pooled")}
        return found

    def encode_negative(self, text: str) -> dict[str, Tensor]:
        device = self.text_encoders[0].device
        embeds, _, pooled, _ = self.pipe.encode_prompt(text, device=device, do_classifier_free_guidance=False)
        size = (self.sampling.height, self.sampling.width)
        told = torch.tensor([*size, 0, 0, *size], dtype=embeds.dtype)
        found = {"embeds": embeds[0], "pooled": pooled[0], "sizes": told}
        return {name: value.to(self.device) for name, value in found.items()}

    def conditions(self, features: dict[str, Tensor]) -> Conditions:
        added = {"text_embeds": features["pooled"], "time_ids": features["sizes"]}
        return {"encoder_hidden_states": features["embeds"], "added_cond_kwargs": added}


def build(recipe: Recipe, path: str, device: torch.device) -> FlowPipeline:
    """See ``loading.build``."""
    return loading.build(SDXLAdapter, recipe, path, device)


def describe(recipe: Recipe, path: str, architecture: Path | None) -> Description:
    """See ``loading.describe``."""
    return loading.describe(SDXLAdapter, recipe, path, architecture)
