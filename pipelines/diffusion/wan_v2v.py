"""Wan 2.1 video-to-video (``WanVideoToVideoPipeline``): a text and the clip that sampling starts from.

The checkpoint is one of text-to-video. The latents of the clip are noised to the level of the first step that
``sampling.strength`` takes, and denoised from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import diffusers  # its parts are loaded when they are first used
import torch
from PIL import Image
from torch import Tensor

from mmrl.core.json_types import Json

from . import loading
from .pictures import scaled
from .wan import WanAdapter


class WanV2VAdapter(WanAdapter):
    """Final class. Every prompt carries one clip, whose frames are brought to the size that is sampled."""

    family = "Wan video-to-video"
    pipeline = "WanVideoToVideoPipeline"
    saved_as = ("WanPipeline",)
    edits = True
    clips = True
    starts = True
    takes_noise = False
    unused = ()
    index = {"boundary_ratio": (None,), "expand_timesteps": (None, False)}  # noqa: RUF012

    @classmethod
    def check_index(cls, pipe: diffusers.DiffusionPipeline) -> None:
        """Nothing: the class of diffusers keeps none of these fields (``index``)."""

    def encode_source(self, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """``source``: the latents ``[C, F, h, w]`` of the clip."""
        clip = torch.stack([scaled(frame) for frame in pictures]).to(self.device)
        return {"source": self.encode_image(clip.unsqueeze(0))[0].float()}

    def started(self, noisy: Tensor, features: dict[str, Tensor], start: float) -> Tensor:
        return noisy + (1 - start) * features["source"][-len(noisy) :]

    def call(self) -> dict[str, Json]:
        of_clip = {name: value for name, value in super().call().items() if name != "num_frames"}
        return of_clip | {"strength": self.sampling.strength}


build, describe = loading.entry_points(WanV2VAdapter)
