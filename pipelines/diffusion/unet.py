"""UNets that predict noise: Stable Diffusion 1, 2 and XL."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import diffusers  # its parts are loaded when they are first used
from torch import Tensor, nn

from mmrl.core.json_types import Json

from .adapter import Conditions, Read, clip_reads
from .fields import Width, text_width, vae_widths
from .noise_prediction import NoisePredictionAdapter


class UNetAdapter(NoisePredictionAdapter, ABC):
    """What the families with a UNet share (abstract)."""

    trains = "unet"
    fixed: ClassVar[Mapping[str, tuple[Json, ...]]] = {
        "time_cond_proj_dim": (None,),  # guidance as an input: latent consistency models
        "class_embed_type": (None,),
        "class_embeddings_concat": (False,),
        "num_class_embeds": (None,),
        "encoder_hid_dim_type": (None, "text_proj"),  # others read pictures
        "addition_embed_type": (None,),
    }
    lora_file = "kohya"
    lora_targets = ("to_k", "to_out.0", "to_q", "to_v")  # DDPO's choice

    @classmethod
    def widths(cls, pipe: diffusers.DiffusionPipeline) -> Iterator[Width]:
        config = pipe.unet.config
        yield from vae_widths(pipe, cls.trains, "in_channels", "out_channels")
        text = sum(text_width(one) for one in (getattr(pipe, name) for name in cls.encoders) if one is not None)
        name = "encoder_hid_dim" if config["encoder_hid_dim"] is not None else "cross_attention_dim"
        widths = config[name] if isinstance(config[name], list | tuple) else [config[name]]
        yield name, [*dict.fromkeys(widths)], [text], f"text encoders of width {text}"

    def read(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        return clip_reads(text, tokenizers)

    @property
    def patch(self) -> int:
        return 2 ** (len(self.pipe.unet.config.block_out_channels) - 1)  # or up-blocks do not meet

    def denoise(self, model: nn.Module, z: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        return model(z, timestep, **self.conditions(features), return_dict=False)[0]

    def conditions(self, features: dict[str, Tensor]) -> Conditions:
        """The UNet's arguments besides latents and timestep."""
        return {"encoder_hidden_states": features["embeds"]}
