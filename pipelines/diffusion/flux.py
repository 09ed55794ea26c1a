"""FLUX.1 (``FluxPipeline``): dev, whose guidance is an input of the model, and schnell, which takes none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import diffusers  # its parts are loaded when they are first used
import torch
from torch import Tensor, nn

from mmrl.core.json_types import Json
from mmrl.core.transfer import to_device

from . import loading
from .adapter import Read, clip_reads
from .fields import Width, encoder_width, vae_widths
from .packed import PackedAdapter, own_sigmas, packed, unpacked


class FluxAdapter(PackedAdapter):
    """``sampling.guidance_scale`` is what the model is told, as in the stock pipeline's call; there is one
    prediction a step. A loss tells it the same."""

    family = "FLUX.1"
    pipeline = "FluxPipeline"
    encoders = ("text_encoder", "text_encoder_2")
    unused = ("image_encoder", "feature_extractor")
    fixed = {"patch_size": (1,)}  # noqa: RUF012
    statistics = ("scaling_factor", "shift_factor")
    lora_file = "diffusers"
    lora_targets = (  # Flow-GRPO's choice for FLUX.1
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_k",
        "attn.to_out.0",
        "attn.to_q",
        "attn.to_v",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )

    @classmethod
    def widths(cls, pipe: diffusers.DiffusionPipeline) -> Iterator[Width]:
        yield from vae_widths(pipe, cls.trains, "in_channels", "out_channels", times=4, may_lack=True)
        yield encoder_width(pipe, "joint_attention_dim", pipe.text_encoder_2)
        yield encoder_width(pipe, "pooled_projection_dim", pipe.text_encoder)

    def read(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        return clip_reads(text, tokenizers, self.encoders[-1], self.sampling.max_sequence_length)

    @property
    def combines(self) -> bool:
        return False

    def encode(self, text: str) -> dict[str, Tensor]:
        device, most = self.text_encoders[0].device, self.sampling.max_sequence_length
        embeds, pooled, _ = self.pipe.encode_prompt(text, None, device=device, max_sequence_length=most)
        return {"embeds": embeds[0].to(self.device), "pooled": pooled[0].to(self.device)}

    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        embeds, shape = features["embeds"], tuple(x.shape[1:])
        pictures = [x, features["source"]] if "source" in features else [x]
        tokens = torch.cat([packed(picture.to(embeds.dtype)) for picture in pictures], 1)
        places = torch.cat([_places(shape, n) for n in range(len(pictures))])
        told = self.pipe.transformer.config.guidance_embeds
        v = model(
            hidden_states=tokens,
            timestep=timestep / 1000,
            guidance=torch.full_like(timestep, self.sampling.guidance_scale) if told else None,
            pooled_projections=features["pooled"],
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(embeds.shape[1], 3, dtype=embeds.dtype, device=embeds.device),
            img_ids=to_device(places.to(embeds.dtype), embeds.device),
            return_dict=False,
        )[0]
        return unpacked(v[:, : tokens.shape[1] // len(pictures)], shape)

    def _spacing(self, steps: int) -> dict[str, Json]:
        return own_sigmas(self.pipe.scheduler, super()._spacing(steps))

    def call(self) -> dict[str, Json]:
        return super().call() | {"max_sequence_length": self.sampling.max_sequence_length}


def _places(shape: tuple[int, ...], picture: int) -> Tensor:
    """Where the tokens of latents of a ``shape`` are: picture, row and column, ``[H / 2 * W / 2, 3]``."""
    rows, columns = torch.meshgrid(torch.arange(shape[1] // 2), torch.arange(shape[2] // 2), indexing="ij")
    return torch.stack([torch.full_like(rows, picture), rows, columns], -1).flatten(0, 1)


build, describe = loading.entry_points(FluxAdapter)
