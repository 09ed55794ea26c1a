"""Wan 2.1 image-to-video (``WanImageToVideoPipeline``): a text and the picture that the clip begins with.

The model is given the noisy latents, a mask that marks the first frame, and the latents of a clip of the picture and
gray, joined by channel. Checkpoints with an image encoder (CLIP) show it the picture, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import diffusers  # its parts are loaded when they are first used
import torch
from PIL import Image
from torch import Tensor, nn

from mmrl.config.sampling import Sampling
from mmrl.core.errors import UserError

from . import loading
from .fields import Width
from .pictures import scaled
from .wan import WanAdapter

_LENGTH = 512
"""Tokens of text that diffusers' attention takes for granted behind those of the image encoder."""


class WanI2VAdapter(WanAdapter):
    """Every prompt carries one picture, which is brought to the size that is sampled."""

    family = "Wan image-to-video"
    pipeline = "WanImageToVideoPipeline"
    edits = True
    encoders = ("text_encoder", "image_encoder")
    may_lack = ("image_encoder",)
    fixed = {"pos_embed_seq_len": (None,)}  # noqa: RUF012

    def __init__(self, pipe: diffusers.DiffusionPipeline, sampling: Sampling, device: torch.device) -> None:
        super().__init__(pipe, sampling, device)
        if pipe.image_encoder is not None and sampling.max_sequence_length != _LENGTH:
            raise UserError(
                f"sampling.max_sequence_length: {self.family} with an image encoder reads texts as {_LENGTH} tokens, "
                f"and takes {sampling.max_sequence_length} for other parts of what it is shown; set it to {_LENGTH}"
            )

    @classmethod
    def check_index(cls, pipe: diffusers.DiffusionPipeline) -> None:
        of = {"boundary_ratio": "diffusion/wan22_i2v_a14b", "expand_timesteps": "diffusion/wan22_i2v_5b"}
        for name, pipeline in of.items():
            if pipe.config[name]:
                raise UserError(
                    f"model.path: model_index.json says {name}: {pipe.config[name]}, which is of a Wan 2.2; set "
                    f"pipeline to {pipeline}, or give a Wan 2.1 image-to-video"
                )

    @classmethod
    def widths(cls, pipe: diffusers.DiffusionPipeline) -> Iterator[Width]:
        yield from super().widths(pipe)
        config: Any = pipe.transformer.config
        sees: Any = pipe.image_encoder
        inner = config["num_attention_heads"] * config["attention_head_dim"]
        why = "no image encoder" if sees is None else f"an image encoder of width {sees.config.hidden_size}"
        yield "image_dim", config["image_dim"], None if sees is None else sees.config.hidden_size, why
        yield "added_kv_proj_dim", config["added_kv_proj_dim"], None if sees is None else inner, why

    @classmethod
    def added(cls, pipe: diffusers.DiffusionPipeline) -> int:
        return pipe.vae_scale_factor_temporal + pipe.transformer.config.out_channels

    def encode_source(self, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """``source``: the latents ``[C, F, h, w]`` of the clip that is only known to begin; ``seen``: the states
        ``[T, width]`` of the image encoder, where there is one."""
        pixels = scaled(pictures[0]).to(self.device).unsqueeze(0)
        unknown = pixels.new_zeros((self.sampling.frames or 1) - 1, *pixels.shape[1:])
        features = {"source": self.encode_image(torch.cat([pixels, unknown]).unsqueeze(0))[0].float()}
        encoder: Any = self.pipe.image_encoder
        if encoder is not None:
            shown = self._shown(pictures[0]).to(encoder.device, encoder.dtype)
            features["seen"] = encoder(pixel_values=shown, output_hidden_states=True).hidden_states[-2][0]
        return {name: tensor.to(self.device) for name, tensor in features.items()}

    def _shown(self, picture: Image.Image) -> Tensor:
        """What the image encoder is given; in a plan it is nothing of the same shape."""
        if self.pipe.image_processor is None:
            side: int = self.pipe.image_encoder.config.image_size
            return torch.zeros(1, 3, side, side)
        return self.pipe.image_processor(images=picture, return_tensors="pt").pixel_values

    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        embeds, source = features["embeds"], features["source"]
        known = x.new_zeros(len(x), self.pipe.vae_scale_factor_temporal, *x.shape[2:])
        known[:, :, 0] = 1
        given = torch.cat([x, known, source], 1).to(embeds.dtype)
        seen = {"encoder_hidden_states_image": features["seen"]} if "seen" in features else {}
        return model(given, timestep, embeds, return_dict=False, **seen)[0]


build, describe = loading.entry_points(WanI2VAdapter)
