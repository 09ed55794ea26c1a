"""Stable Diffusion XL (``StableDiffusionXLPipeline``), sampled with DDIM."""

from __future__ import annotations

from collections.abc import Iterator

import diffusers  # its parts are loaded when they are first used
import torch
from torch import Tensor

from . import loading
from .adapter import Conditions, by_channel
from .fields import Width
from .unet import UNetAdapter


class SDXLAdapter(UNetAdapter):
    """Final class. The sizes that the model is told of are those of the picture: nothing scaled, nothing cropped."""

    family = "Stable Diffusion XL"
    pipeline = "StableDiffusionXLPipeline"
    encoders = ("text_encoder", "text_encoder_2")
    fixed = {**UNetAdapter.fixed, "addition_embed_type": ("text_time",)}  # noqa: RUF012
    may_lack = ("text_encoder",)
    unused = ("feature_extractor", "image_encoder")
    options = {"add_watermarker": False}  # noqa: RUF012

    @classmethod
    def widths(cls, pipe: diffusers.DiffusionPipeline) -> Iterator[Width]:
        yield from super().widths(pipe)
        config, pooled = pipe.unet.config, pipe.text_encoder_2.config.projection_dim
        name, told = "projection_class_embeddings_input_dim", config["addition_time_embed_dim"]
        needed = 6 * told + pooled if isinstance(told, int) else None
        yield name, config[name], needed, f"six sizes of width {told} and a pooled text of width {pooled}"

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

    def _as_vae_has(self, latents: Tensor) -> Tensor:
        mean, std = self._normal(latents)
        return latents * std / self.pipe.vae.config.scaling_factor + mean

    def _as_model_sees(self, latents: Tensor) -> Tensor:
        mean, std = self._normal(latents)
        return (latents - mean) * self.pipe.vae.config.scaling_factor / std

    def _normal(self, like: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Mean and deviation of the VAE's latents, where it says both."""
        config = self.pipe.vae.config
        if config.latents_mean is None or config.latents_std is None:
            return 0.0, 1.0
        return by_channel(config.latents_mean, like), by_channel(config.latents_std, like)

    def conditions(self, features: dict[str, Tensor]) -> Conditions:
        added = {"text_embeds": features["pooled"], "time_ids": features["sizes"]}
        return {"encoder_hidden_states": features["embeds"], "added_cond_kwargs": added}


build, describe = loading.entry_points(SDXLAdapter)
