"""Stable Diffusion 3 and 3.5 (``StableDiffusion3Pipeline``): how to encode, predict and decode, and what takes LoRA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import diffusers  # its parts are loaded when they are first used
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.json_types import Json

from . import loading
from .adapter import Adapter, Read, clip_reads
from .fields import Width, encoder_width, vae_widths
from .packed import shift_of


class SD3Adapter(Adapter):
    """Final class."""

    family = "Stable Diffusion 3"
    pipeline = "StableDiffusion3Pipeline"
    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    may_lack = ("text_encoder_3",)
    unused = ("image_encoder", "feature_extractor")
    statistics = ("scaling_factor", "shift_factor")
    lora_file = "diffusers"
    lora_targets = (  # Flow-GRPO's choice for SD3.5
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_k",
        "attn.to_out.0",
        "attn.to_q",
        "attn.to_v",
    )

    @classmethod
    def widths(cls, pipe: diffusers.DiffusionPipeline) -> Iterator[Width]:
        yield from vae_widths(pipe, cls.trains, "in_channels", "out_channels")
        pooled = sum(one.config.projection_dim for one in (pipe.text_encoder, pipe.text_encoder_2))
        name = "pooled_projection_dim"
        yield name, pipe.transformer.config[name], pooled, f"pooled texts of width {pooled}"
        if pipe.text_encoder_3 is not None:
            yield encoder_width(pipe, "joint_attention_dim", pipe.text_encoder_3, "T5")

    def read(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        return clip_reads(text, tokenizers, self.encoders[-1], self.sampling.max_sequence_length)

    def encode(self, text: str) -> dict[str, Tensor]:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            text,
            None,
            None,
            device=self.text_encoders[0].device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.sampling.max_sequence_length,
        )
        return {"embeds": embeds[0].to(self.device), "pooled": pooled[0].to(self.device)}

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        shape = super().latent_shape(height, width)
        largest = self.pipe.transformer.config.pos_embed_max_size * self.pipe.vae_scale_factor * self.patch
        if max(height, width) > largest:
            raise UserError(
                f"sampling.height and sampling.width: {height} x {width} is more than the {largest} pixels a side that "
                f"this checkpoint has positions for; use {min(height, largest)} x {min(width, largest)} or less"
            )
        return shape

    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        return model(
            hidden_states=x.to(features["embeds"].dtype),
            timestep=timestep,
            encoder_hidden_states=features["embeds"],
            pooled_projections=features["pooled"],
            return_dict=False,
        )[0]

    def _spacing(self, steps: int) -> dict[str, Json]:
        scheduler = self.pipe.scheduler
        if not scheduler.config.get("use_dynamic_shifting"):
            return {}
        _, height, width = self.latent_shape(self.sampling.height, self.sampling.width)
        patch = self.pipe.transformer.config.patch_size
        return {"mu": shift_of(scheduler, height // patch * (width // patch))}

    def call(self) -> dict[str, Json]:
        return super().call() | {"max_sequence_length": self.sampling.max_sequence_length}


build, describe = loading.entry_points(SD3Adapter)
