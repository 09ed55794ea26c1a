"""UNets that predict noise (Stable Diffusion 1, 2 and XL) in flow coordinates, and their DDIM schedule.

Their states are ``z = a x0 + b eps`` with ``a^2 + b^2 = 1``. ``x = z / (a + b)`` is a state of flow matching at
``s = b / (a + b)``, so ``a = (1 - s) n`` and ``b = s n`` with ``n = ((1 - s)^2 + s^2)^(-1/2) = a + b``, and the
velocity follows from the predicted noise, ``v = eps - (z - b eps) / a``. An Euler step in ``x`` is DDIM's step in ``z``
with eta 0 (arXiv 2010.02502, eq. 12), exactly.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmrl.config.sampling import Sampling
from mmrl.errors import UserError

from .adapter import Adapter, Conditions, Schedule, set_scheduler

if TYPE_CHECKING:  # slow to import
    from diffusers import DiffusionPipeline


class UNetAdapter(Adapter, ABC):
    """What the families with a UNet share (abstract)."""

    trains = "unet"
    lora_file = "kohya"
    lora_targets = ("to_k", "to_out.0", "to_q", "to_v")  # DDPO's choice

    def __init__(self, pipe: DiffusionPipeline, sampling: Sampling, device: torch.device) -> None:
        from diffusers import DDIMScheduler  # pyright: ignore[reportPrivateImportUsage]

        super().__init__(pipe, sampling, device)
        if sampling.schedule != "euler":
            raise UserError(
                f"sampling.schedule: {self.family} is sampled by DDIM's steps at the levels of its own timesteps; "
                "remove it"
            )
        scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
        assert isinstance(scheduler, DDIMScheduler)
        set_scheduler(pipe, scheduler)
        kind = scheduler.config["prediction_type"]
        if kind not in ("epsilon", "v_prediction"):
            raise UserError(
                f"model.path: the scheduler of this checkpoint says that the model predicts {kind!r}, and only epsilon "
                "and v_prediction are understood; correct prediction_type in scheduler/scheduler_config.json"
            )
        self.predicts_noise = kind == "epsilon"
        self._kept = scheduler.alphas_cumprod.double().sqrt().to(device)  # a, by the model's timestep
        self._added = (1 - scheduler.alphas_cumprod.double()).sqrt().to(device)  # b

    @property
    def prepare(self) -> str:
        return (
            "from diffusers import DDIMScheduler\n\n"
            "pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)\n"
        )

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        config, factor = self.pipe.unet.config, self.pipe.vae_scale_factor
        self._fits(height, width, factor * 2 ** (len(config.block_out_channels) - 1))  # or up-blocks do not meet
        return (config.in_channels, height // factor, width // factor)

    def timestep(self, sigma: Tensor) -> Tensor:
        """The nearest of the model's timesteps."""
        levels = self._added / (self._added + self._kept)
        return (levels.unsqueeze(0) - sigma.double().unsqueeze(1)).abs().argmin(1)

    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        index, shape = timestep.long(), (-1, *[1] * (x.ndim - 1))
        a, b = (table[index].view(shape).float() for table in (self._kept, self._added))
        z = (a + b) * x
        out = model(z.to(features["embeds"].dtype), timestep, **self.conditions(features), return_dict=False)[0].float()
        if self.predicts_noise:
            return out - (z - b * out) / a
        return (a + b) * out - (a - b) * z  # out = a eps - b x0

    def conditions(self, features: dict[str, Tensor]) -> Conditions:
        """The UNet's arguments besides latents and timestep."""
        return {"encoder_hidden_states": features["embeds"]}

    def _shift(self, shift: float) -> None:
        raise UserError(
            f"sampling.shift: the noise levels of {self.family} are those of its timesteps, which no shift moves; "
            "remove it"
        )

    def _schedule(self, steps: int) -> Schedule:
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        scheduler.set_timesteps(steps)
        before = scheduler.timesteps - scheduler.config.num_train_timesteps // steps
        final = scheduler.final_alpha_cumprod.double()
        last = torch.where(before >= 0, scheduler.alphas_cumprod.double()[before.clamp(min=0)], final)[-1:]
        kept = torch.cat([scheduler.alphas_cumprod.double()[scheduler.timesteps], last])
        a, b = kept.sqrt(), (1 - kept).clamp(min=0).sqrt()
        total = (a + b).tolist()
        return Schedule(b / (a + b), scheduler.timesteps, start=1 / total[0], end=total[-1])
