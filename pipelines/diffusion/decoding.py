"""Decode clean latents, in half precision where that shows the same pictures."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmrl.config.schema import Recipe
from mmrl.core.notices import tell

from .adapter import Adapter

NEAR = 1 / 255
"""The largest mean difference of pixels in [0, 1]: a level of 8 bits, which is what rewards of pictures get."""


def in_half(recipe: Recipe, device: torch.device) -> bool | None:
    """Whether the VAE multiplies in bfloat16; None: where it shows the same pictures."""
    beside = device.type == "cuda" and recipe.model.dtype == "bfloat16"
    asked = recipe.performance.vae
    return asked == "bfloat16" if asked != "auto" else None if beside else False


def lay(vae: nn.Module, recipe: Recipe, device: torch.device) -> None:
    """Have channels last (NHWC) in the weights of a VAE that may multiply in bfloat16 on CUDA, whose kernels would
    else reorder them in each call. Not where convolutions go over time, too: what ``channels_last_3d`` gains there
    differs from model to model."""
    over_time = any(parameter.ndim == 5 for parameter in vae.parameters())
    if device.type == "cuda" and in_half(recipe, device) is not False and not over_time:
        vae.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch declares 4 dimensions only


class Decoder:
    """Final class. Pictures in [0, 1] float32 of latents. ``half``: whether the VAE multiplies in bfloat16; None: it is
    tried on the first call, with noise that is the same in every process of a run."""

    def __init__(self, adapter: Adapter, recipe: Recipe, device: torch.device) -> None:
        self.adapter = adapter
        self.half = in_half(recipe, device)

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        if self.half is None:
            self.half = self._is_near(latents)
        return self.shown(latents, half=self.half)

    def shown(self, latents: Tensor, *, half: bool = False) -> Tensor:
        """With its gradient."""
        with torch.autocast(latents.device.type, torch.bfloat16, enabled=half):
            return (self.adapter.decode(latents).float() / 2 + 0.5).clamp(0, 1).contiguous()

    def _is_near(self, latents: Tensor) -> bool:
        one = torch.randn(1, *latents.shape[1:], generator=torch.Generator().manual_seed(0)).to(latents)
        gap = (self.shown(one, half=True) - self.shown(one)).abs().mean().item()
        if not (near := gap <= NEAR):
            tell(f"the VAE decodes in float32: in bfloat16 pixels differ by {gap:.3f} on average, {NEAR:.3f} at most")
        return near
