"""Wan text-to-video, 2.1 and the TI2V-5B of 2.2 (``WanPipeline``): clips, and pictures as clips of one frame.

The 5B takes a time for every token (``expand_timesteps``). In text-to-video all are equal, and a time for every sample
gives the same up to rounding (2e-7).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import diffusers  # its parts are loaded when they are first used
import torch
from torch import Tensor, nn

from mmrl.config.sampling import Sampling
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json

from . import loading
from .adapter import Read
from .euler import EulerAdapter
from .fields import Width, encoder_width, latent_channels, vae_widths


class WanAdapter(EulerAdapter):
    """One model that predicts at all times."""

    makes = "video"
    family = "Wan"
    pipeline = "WanPipeline"
    encoders = ("text_encoder",)
    unused = ("transformer_2",)
    fixed = {"image_dim": (None,), "added_kv_proj_dim": (None,), "pos_embed_seq_len": (None,)}  # noqa: RUF012
    statistics = ("latents_mean", "latents_std")
    lora_targets = (
        "attn1.to_k",
        "attn1.to_out.0",
        "attn1.to_q",
        "attn1.to_v",
        "attn2.to_k",
        "attn2.to_out.0",
        "attn2.to_q",
        "attn2.to_v",
    )

    def __init__(self, pipe: diffusers.DiffusionPipeline, sampling: Sampling, device: torch.device) -> None:
        self.check_index(pipe)
        super().__init__(pipe, sampling, device)
        clean_without_ftfy()

    @classmethod
    def check_index(cls, pipe: diffusers.DiffusionPipeline) -> None:
        """Raises ``UserError`` where ``model_index.json`` says that it is another kind of Wan."""
        if pipe.config["boundary_ratio"] is not None:
            raise UserError(
                "model.path: this is a Wan 2.2 of two models, each for times of its own (boundary_ratio in "
                "model_index.json); set pipeline to diffusion/wan22_a14b"
            )

    @classmethod
    def widths(cls, pipe: diffusers.DiffusionPipeline) -> Iterator[Width]:
        config, channels = pipe.transformer.config, latent_channels(pipe)
        yield "in_channels", config["in_channels"], channels + cls.added(pipe), f"a VAE of {channels} latent channels"
        yield from vae_widths(pipe, cls.trains, "out_channels")
        yield encoder_width(pipe, "text_dim", pipe.text_encoder)
        yield "patch_size", config["patch_size"][0], 1, "frames that are apart"

    @classmethod
    def added(cls, pipe: diffusers.DiffusionPipeline) -> int:
        """How many channels follow those of the latents in what the model is given."""
        return 0

    def read(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return self._reads(prompt_clean(text), tokenizers["text_encoder"])

    def encode(self, text: str) -> dict[str, Tensor]:
        device, most = self.text_encoders[0].device, self.sampling.max_sequence_length
        embeds, _ = self.pipe.encode_prompt(
            text, do_classifier_free_guidance=False, device=device, max_sequence_length=most
        )
        return {"embeds": embeds[0].to(self.device)}

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        space, time = self.pipe.vae_scale_factor_spatial, self.pipe.vae_scale_factor_temporal
        self._fits(height, width, max(self.pipe.transformer.config.patch_size[1:]) * space)
        channels = self.pipe.transformer.config.out_channels
        return (channels, self._latent_frames(time), height // space, width // space)

    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        embeds = features["embeds"]
        return model(x.to(embeds.dtype), timestep, embeds, return_dict=False)[0]

    def call(self) -> dict[str, Json]:
        return {
            "num_frames": self.sampling.frames or 1,
            "guidance_scale": self.sampling.guidance_scale,
            "max_sequence_length": self.sampling.max_sequence_length,
        }


def clean_without_ftfy() -> None:
    """Let diffusers clean prompts without ftfy where that is not installed, as ``WanPipeline`` does."""
    from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v, pipeline_wan_video2video

    pipeline_wan_i2v.basic_clean = pipeline_wan_video2video.basic_clean = pipeline_wan.basic_clean


build, describe = loading.entry_points(WanAdapter)
