"""Shared code of FLUX.1 and later families: latents as tokens of 2 x 2, and noise levels shifted by their number."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmrl.core.json_types import Json

from .adapter import Adapter

if TYPE_CHECKING:  # slow to import
    from diffusers.configuration_utils import ConfigMixin


class PackedAdapter(Adapter, ABC):
    """A family whose transformer takes packed latents (abstract)."""

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        factor = self.pipe.vae_scale_factor
        self._fits(height, width, 2 * factor)
        return (self.pipe.transformer.config.in_channels // 4, height // factor, width // factor)

    def given_noise(self, noise: Tensor) -> dict[str, Tensor]:
        return {"latents": packed(noise)}

    def _spacing(self, steps: int) -> dict[str, Json]:
        _, height, width = self.latent_shape(self.sampling.height, self.sampling.width)
        return shifted(self.pipe.scheduler, steps, height // 2 * (width // 2))


def shifted(scheduler: ConfigMixin, steps: int, tokens: int) -> dict[str, Json]:
    """The spacing of FLUX and of those after it: even sigmas, shifted by how many tokens a picture has."""
    sigmas = torch.linspace(1.0, 1 / steps, steps, dtype=torch.float64).tolist()
    return {"sigmas": sigmas, "mu": shift_of(scheduler, tokens)}


def shift_of(scheduler: ConfigMixin, tokens: int) -> float:
    """The shift of a picture of ``tokens`` tokens, ``mu`` of diffusers: on the line between those that are stored."""
    config = scheduler.config
    base, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (high - low) / (most - base)
    return tokens * slope + low - slope * base


def own_sigmas(scheduler: ConfigMixin, spacing: dict[str, Json]) -> dict[str, Json]:
    """``spacing``, without even sigmas where the scheduler says ``use_flow_sigmas``: the stock FLUX pipelines then
    leave them to it."""
    return {k: v for k, v in spacing.items() if k != "sigmas" or not scheduler.config.get("use_flow_sigmas")}


def packed(latents: Tensor) -> Tensor:
    """``[B, C, H, W]`` as tokens of 2 x 2 pixels, ``[B, H / 2 * W / 2, 4 C]``, row by row."""
    b, c, h, w = latents.shape
    return latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h // 2 * (w // 2), 4 * c)


def unpacked(tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undo ``packed``; ``shape`` ``(C, H, W)`` of one sample."""
    c, h, w = shape
    return tokens.view(len(tokens), h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), c, h, w)
