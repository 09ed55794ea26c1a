"""Wan 2.2 A14B text-to-video (``WanPipeline`` with ``transformer_2``): two models, one for high noise and one for low.

``boundary_ratio`` of ``model_index.json`` is the noise level between them.
"""

from __future__ import annotations

import diffusers  # its parts are loaded when they are first used
import torch
from torch import Tensor, nn

from mmrl.config.sampling import Sampling
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json

from . import loading
from .experts import Experts
from .wan import WanAdapter


class Wan22A14BAdapter(WanAdapter):
    """Final class. ``sampling.guidance_scale`` is of the model for high noise, ``sampling.guidance_scale_2`` of the
    other; without it both have the first."""

    family = "Wan 2.2 A14B"
    of_one = "diffusion/wan"
    """The pipeline of a checkpoint of one model."""
    unused = ()
    also_trains = ("transformer_2",)

    def __init__(self, pipe: diffusers.DiffusionPipeline, sampling: Sampling, device: torch.device) -> None:
        super().__init__(pipe, sampling, device)
        (second,) = self.also_trains
        models = (self.trains, pipe.transformer), (second, getattr(pipe, second))
        self._experts = Experts(*models, self._boundary)

    @classmethod
    def check_index(cls, pipe: diffusers.DiffusionPipeline) -> None:
        ratio = pipe.config["boundary_ratio"]
        if not isinstance(ratio, int | float) or not 0 < ratio < 1:
            raise UserError(
                f"model.path: model_index.json says boundary_ratio: {ratio}, and it is the noise level between two "
                f"models, above 0 and below 1; give a Wan 2.2 A14B, or set pipeline to {cls.of_one} for one model"
            )
        if pipe.config["expand_timesteps"]:
            raise UserError(
                "model.path: model_index.json says expand_timesteps: true, which is of a Wan 2.2 of one model; give a "
                "Wan 2.2 A14B, or set pipeline to diffusion/wan"
            )

    @property
    def _boundary(self) -> float:
        """The least timestep of the model for high noise."""
        return self.pipe.config["boundary_ratio"] * self.pipe.scheduler.config.num_train_timesteps

    @property
    def model(self) -> nn.Module:
        return self._experts

    def expert(self, timestep: float) -> str:
        return self.trained()[timestep < self._boundary]

    def scale(self, timestep: Tensor, scale: float) -> float | Tensor:
        second = self.sampling.guidance_scale_2
        if second is None or scale != self.sampling.guidance_scale:
            return scale
        scales = torch.where(timestep >= self._boundary, scale, second)
        return scales.to(torch.float32).view(-1, 1, 1, 1, 1)

    def call(self) -> dict[str, Json]:
        second = self.sampling.guidance_scale_2
        return super().call() | ({} if second is None else {"guidance_scale_2": second})


build, describe = loading.entry_points(Wan22A14BAdapter)
