"""Wan 2.2 TI2V-5B from a picture (``WanImageToVideoPipeline``): the first latent frame is that of the picture in every
step.

States, noise, log-probs and losses are of the other frames alone. The model is given all frames, each token with a time
of its own (``expand_timesteps``): 0 of the first frame, that of the step of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import diffusers  # its parts are loaded when they are first used
import torch
from PIL import Image
from torch import Tensor, nn

from mmrl.core.errors import UserError

from . import loading
from .pictures import scaled
from .wan import WanAdapter


class Wan22I2V5BAdapter(WanAdapter):
    """Final class. Every prompt carries one picture, which is brought to the size that is sampled."""

    family = "Wan 2.2 TI2V-5B from a picture"
    pipeline = "WanImageToVideoPipeline"
    saved_as = ("WanPipeline",)
    edits = True
    holds = True
    unused = ("transformer_2", "image_encoder", "image_processor")

    @classmethod
    def check_index(cls, pipe: diffusers.DiffusionPipeline) -> None:
        super().check_index(pipe)
        if not pipe.config["expand_timesteps"]:
            raise UserError(
                "model.path: model_index.json says expand_timesteps: false, and a model that keeps the first frame has "
                "a time for every token; give a Wan 2.2 TI2V-5B, or set pipeline to diffusion/wan or diffusion/wan_i2v"
            )

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        channels, frames, *size = super().latent_shape(height, width)
        if frames == 1:
            more = self.pipe.vae_scale_factor_temporal + 1
            raise UserError(
                f"sampling.frames: the first frame is the prompt's picture, and no other is left; use {more}"
            )
        return (channels, frames - 1, *size)

    def encode_source(self, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """``source``: the latents ``[C, 1, h, w]`` of the first frame."""
        return {"source": self.encode_image(scaled(pictures[0]).to(self.device)[None, None])[0].float()}

    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        embeds, given = features["embeds"], self.whole(x, features)
        _, down, across = self.pipe.transformer.config.patch_size
        frame = (x.shape[3] // down) * (x.shape[4] // across)
        later = timestep.unsqueeze(1).expand(-1, frame * x.shape[2])
        times = torch.cat([later.new_zeros(len(x), frame), later], 1)
        return self.free(model(given.to(embeds.dtype), times, embeds, return_dict=False)[0])

    def whole(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        return torch.cat([features["source"][-len(latents) :], latents], 2)

    def free(self, latents: Tensor) -> Tensor:
        return latents[:, :, 1:]

    def given_noise(self, noise: Tensor) -> dict[str, Tensor]:
        return {"latents": torch.cat([torch.zeros_like(noise[:, :, :1]), noise], 2)}


build, describe = loading.entry_points(Wan22I2V5BAdapter)
