"""LTX-2 from a clip (``LTX2ConditionPipeline`` with a clip at its first frame): its beginning stays, and what is made
goes on from it.

The latents of the first ``sampling.held_frames`` frames of the clip are held as those of a picture are in
``ltx2_i2v.py``. The sound is made for all frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import diffusers  # its parts are loaded when they are first used
import torch
from PIL import Image
from torch import Tensor

from mmrl.config.sampling import Sampling
from mmrl.core.errors import UserError

from . import loading
from .ltx2 import LTX2Adapter
from .ltx2_i2v import LTX2I2VAdapter
from .pictures import scaled

sounds = True


class LTX2V2VAdapter(LTX2I2VAdapter):
    """Final class. Every prompt carries one clip, whose frames are brought to the size that is sampled."""

    family = "LTX-2 from a clip"
    pipeline = "LTX2ConditionPipeline"
    clips = True
    compresses = False
    unused = (*LTX2Adapter.unused, "audio_scheduler")
    index = {"audio_scheduler": (None, [None, None])}  # noqa: RUF012  # one schedule is for both

    def __init__(self, pipe: diffusers.DiffusionPipeline, sampling: Sampling, device: torch.device) -> None:
        super().__init__(pipe, sampling, device)
        time, held = pipe.vae_temporal_compression_ratio, sampling.held_frames or 1
        if over := (held - 1) % time:
            raise UserError(
                f"sampling.held_frames: {held} is not one more than a multiple of {time}, which this checkpoint's VAE "
                f"needs; use {held - over + time}"
            )

    @property
    def held(self) -> int:
        return ((self.sampling.held_frames or 1) - 1) // self.pipe.vae_temporal_compression_ratio + 1

    def encode_source(self, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """``source``: the tokens ``[N, C]`` of the frames that stay."""
        return {"source": self._tokens(torch.stack([scaled(frame) for frame in pictures], 1))}

    def given_sources(self, sources: list[Image.Image]) -> dict[str, Any]:
        from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition

        return {"conditions": [LTX2VideoCondition(frames=sources)]}

    def opened(self) -> tuple[str, str]:
        imports = (
            "from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition\n"
            "from diffusers.utils import load_video\n"
        )
        frames = f'load_video("clip.mp4")[:{self.sampling.held_frames}]'
        return imports, f"conditions=[LTX2VideoCondition(frames={frames})]"

    def given_noise(self, noise: Tensor) -> dict[str, Tensor]:
        return dict(zip(("latents", "audio_latents"), self._drawn(noise), strict=True))


build, describe = loading.entry_points(LTX2V2VAdapter)
