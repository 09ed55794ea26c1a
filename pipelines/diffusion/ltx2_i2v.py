"""LTX-2 from a picture (``LTX2ImageToVideoPipeline``): the first latent frame is that of the picture in every step.

States, noise, log-probs and losses are of the other frames and of the sound. The model is given all tokens, those of
the picture with a time of their own: 0 of the first frame, that of the step of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import diffusers  # its parts are loaded when they are first used
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mmrl.config.sampling import Sampling
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json
from mmrl.core.media.decoding import needs

from . import loading
from .adapter import by_channel
from .ltx2 import LTX2Adapter
from .pictures import scaled

sounds = True


class LTX2I2VAdapter(LTX2Adapter):
    """Every prompt carries one picture, which is brought to the size that is sampled and compressed there
    (``sampling.image_crf``), as the stock call does."""

    family = "LTX-2 from a picture"
    pipeline = "LTX2ImageToVideoPipeline"
    saved_as = ("LTX2Pipeline",)
    edits = True
    holds = True
    takes_noise = False  # it would take the first frame from the noise
    compresses = True

    def __init__(self, pipe: diffusers.DiffusionPipeline, sampling: Sampling, device: torch.device) -> None:
        super().__init__(pipe, sampling, device)
        if self.compresses and sampling.image_crf != 0:
            needs("av", f"sampling.image_crf: {self.family} compresses pictures with PyAV (0 leaves them as they are)")

    @property
    def held(self) -> int:
        """How many latent frames stay, the first ones."""
        return 1

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        (numbers,) = super().latent_shape(height, width)
        frames, h, w, _ = self._size(height, width)
        if frames <= self.held:
            given = "the first frame is the prompt's picture"
            if self.clips:
                given = f"{self.sampling.held_frames} frames are those of the prompt's clip (sampling.held_frames)"
            more = self.held * self.pipe.vae_temporal_compression_ratio + 1
            raise UserError(f"sampling.frames: {given}, and no other is left; use {more}")
        return (numbers - self.held * h * w * self.pipe.transformer.config.in_channels,)

    def encode_source(self, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """``source``: the tokens ``[N, C]`` of the first frame."""
        from diffusers.pipelines.ltx2 import utils

        crf, picture = self.sampling.image_crf, pictures[0]
        if crf is None:
            crf = utils.resolve_default_image_crf(self.pipe.text_encoder)
        shown = Image.fromarray(utils.apply_image_conditioning_crf(np.array(picture), crf))
        return {"source": self._tokens(scaled(shown).unsqueeze(1))}

    def _tokens(self, clip: Tensor) -> Tensor:
        """``[N, C]`` of frames ``[3, F, H, W]``. They are not scaled by ``scaling_factor``, as in the stock call."""
        vae = self.pipe.vae
        found = vae.encode(clip.unsqueeze(0).to(self.device)).latent_dist.mode()
        mean, std = (by_channel(one, found) for one in (vae.latents_mean, vae.latents_std))
        return ((found - mean) / std)[0].flatten(1).T.float()

    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        return self.free(super().predict(model, self.whole(x, features), timestep, features))

    def _times(self, timestep: Tensor) -> dict[str, Tensor]:
        frames, height, width, _ = self._own
        later = timestep.unsqueeze(1).expand(-1, (frames - self.held) * height * width)
        held = later.new_zeros(len(later), self.held * height * width)
        return {"timestep": torch.cat([held, later], 1), "audio_timestep": timestep}

    def whole(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        return torch.cat([features["source"][-len(latents) :].flatten(1), latents], 1)

    def free(self, latents: Tensor) -> Tensor:
        return latents[:, -self.latent_shape(*self.sampling.size)[0] :]

    def call(self) -> dict[str, Json]:
        crf = self.sampling.image_crf
        return super().call() | ({} if crf is None else {"image_crf": crf})

    def given_noise(self, noise: Tensor) -> dict[str, Tensor]:
        picture, sound = self._drawn(noise)
        channels = self.pipe.audio_vae.config.latent_channels
        return {
            "latents": picture.transpose(1, 2).unflatten(2, self._own[:3]),
            "audio_latents": sound.unflatten(2, (channels, -1)).transpose(1, 2),
        }

    def _drawn(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, N, C]`` of picture and sound, with 0 for those that are held."""
        (_, height, width, _), (picture, sound) = self._own, self.parts(noise)
        held = picture.new_zeros(len(picture), self.held * height * width, picture.shape[2])
        return torch.cat([held, picture], 1), sound


build, describe = loading.entry_points(LTX2I2VAdapter)
