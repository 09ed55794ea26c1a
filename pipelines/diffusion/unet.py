"""UNets that predict noise: Stable Diffusion 1, 2 and XL."""

from __future__ import annotations

from abc import ABC

from torch import Tensor, nn

from .adapter import Conditions
from .noise_prediction import NoisePredictionAdapter


class UNetAdapter(NoisePredictionAdapter, ABC):
    """What the families with a UNet share (abstract)."""

    trains = "unet"
    lora_file = "kohya"
    lora_targets = ("to_k", "to_out.0", "to_q", "to_v")  # DDPO's choice

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        config, factor = self.pipe.unet.config, self.pipe.vae_scale_factor
        self._fits(height, width, factor * 2 ** (len(config.block_out_channels) - 1))  # or up-blocks do not meet
        return (config.in_channels, height // factor, width // factor)

    def denoise(self, model: nn.Module, z: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        return model(z, timestep, **self.conditions(features), return_dict=False)[0]

    def conditions(self, features: dict[str, Tensor]) -> Conditions:
        """The UNet's arguments besides latents and timestep."""
        return {"encoder_hidden_states": features["embeds"]}
