"""Models that predict noise (Stable Diffusion 1, 2 and XL, PixArt) in flow coordinates, and their DDIM schedule.

Their states are ``z = a x0 + b eps`` with ``a^2 + b^2 = 1``. ``x = z / (a + b)`` is a state of flow matching at
``s = b / (a + b)``, so ``a = (1 - s) n`` and ``b = s n`` with ``n = ((1 - s)^2 + s^2)^(-1/2) = a + b``, and the
velocity follows from the predicted noise, ``v = eps - (z - b eps) / a``. An Euler step in ``x`` is DDIM's step in ``z``
with eta 0 (arXiv 2010.02502, eq. 12), exactly.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import diffusers  # its parts are loaded when they are first used
import torch
from torch import Tensor, nn

from mmrl.config.sampling import Sampling
from mmrl.core.errors import UserError

from .adapter import Adapter, Schedule
from .fields import HOW_IT_STEPS, not_default, says


class NoisePredictionAdapter(Adapter, ABC):
    """What families share whose model, ``trains``, predicts noise, or ``v_prediction`` (abstract).

    ``DDIMScheduler`` replaces the checkpoint's scheduler, with the checkpoint's noise levels. A family gives
    ``denoise`` in place of ``predict``.
    """

    spacing: ClassVar[Literal["leading", "trailing"] | None] = None
    """How the steps' timesteps are spaced (diffusers' ``timestep_spacing``); None: as the checkpoint's scheduler says.
    Families whose checkpoints say ``linspace`` set it."""

    def __init__(self, pipe: diffusers.DiffusionPipeline, sampling: Sampling, device: torch.device) -> None:
        super().__init__(pipe, sampling, device)
        if sampling.schedule != "euler":
            raise UserError(
                f"sampling.schedule: {self.family} is sampled by DDIM's steps at the levels of its own timesteps; "
                "remove it"
            )
        own = pipe.scheduler
        # from_config leaves out what a file did not give, and Stable Diffusion's pipeline gives it this one itself.
        self._settings: dict[str, Any] = {"clip_sample": False, "steps_offset": own.config.get("steps_offset", 0)}
        if self.spacing is not None:
            self._settings["timestep_spacing"] = self.spacing
        scheduler = diffusers.DDIMScheduler.from_config(own.config, **self._settings)
        assert isinstance(scheduler, diffusers.DDIMScheduler)
        if scheduler.config["timestep_spacing"] == "linspace":
            raise UserError(
                "model.path: the scheduler of this checkpoint says timestep_spacing: linspace, and diffusers' DDIM "
                "then ends no step where the next one begins; write leading or trailing in "
                'scheduler/scheduler_config.json, or spacing = "trailing" in the adapter'
            )
        pipe.scheduler = scheduler
        kind = scheduler.config["prediction_type"]
        if kind not in ("epsilon", "v_prediction"):
            raise UserError(
                f"model.path: the scheduler of this checkpoint says that the model predicts {kind!r}, and only epsilon "
                "and v_prediction are understood; correct prediction_type in scheduler/scheduler_config.json"
            )
        if not torch.allclose(scheduler.betas, own.betas, rtol=1e-4, atol=0) or kind != own.config["prediction_type"]:
            raise UserError(
                f"model.path: the scheduler of this checkpoint, a {type(own).__name__}, leaves noise levels to its own "
                "defaults, which are not DDIM's; write beta_start, beta_end, beta_schedule, trained_betas, "
                "rescale_betas_zero_snr and prediction_type into scheduler/scheduler_config.json as "
                f"{type(own).__name__} has them"
            )
        self.predicts_noise = kind == "epsilon"
        if self.predicts_noise and scheduler.config["rescale_betas_zero_snr"]:
            raise says(own, "rescale_betas_zero_snr", "nothing follows from the noise where nothing else is", False)
        self._kept = scheduler.alphas_cumprod.double().sqrt().to(device)  # a, by the model's timestep
        self._added = (1 - scheduler.alphas_cumprod.double()).sqrt().to(device)  # b

    def _check_scheduler(self) -> None:
        """All of a scheduler's settings but those of how it steps are DDIM's too, or have their default."""
        from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers

        own: Any = self.pipe.scheduler
        if type(own).__name__ not in KarrasDiffusionSchedulers.__members__ or not hasattr(own, "betas"):
            raise UserError(
                f"model.path: the scheduler of this checkpoint is a {type(own).__name__}, whose model DDIM does not "
                f"sample ({self.family} is sampled by DDIM's steps); give a checkpoint without one"
            )
        if len(own.betas) != own.config["num_train_timesteps"]:
            raise UserError(
                f"model.path: the scheduler of this checkpoint has {len(own.betas)} trained_betas and "
                f"{own.config['num_train_timesteps']} num_train_timesteps; correct one of them in "
                "scheduler/scheduler_config.json"
            )
        of_ddim = {*inspect.signature(diffusers.DDIMScheduler.__init__).parameters} - {"thresholding"}
        for name, _, default in not_default(own, HOW_IT_STEPS | of_ddim):
            raise says(own, name, "DDIM, which samples here, has no such setting or does not use it", default)
        if own.config.get("clip_sample"):
            raise says(own, "clip_sample", "latents are not clipped here", False)

    @property
    def prepare(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self._settings.items())
        return (
            "from diffusers import DDIMScheduler\n\n"
            f"pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config{given})\n"
        )

    @abstractmethod
    def denoise(self, model: nn.Module, z: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        """What the model predicts for the noisy latents ``z`` ``[B, ...]``, in the dtype of the features: the noise
        ``eps``, or ``a eps - b x0`` where the checkpoint says ``v_prediction``. ``timestep`` ``[B]`` is the model's
        own, and the text's features are called ``embeds``. A model that also predicts a variance leaves it out here."""

    def timestep(self, sigma: Tensor) -> Tensor:
        """The nearest of the model's timesteps."""
        levels = self._added / (self._added + self._kept)
        return (levels.unsqueeze(0) - sigma.double().unsqueeze(1)).abs().argmin(1)

    @property
    def predicts_velocity(self) -> bool:
        return False

    def levels(self) -> Tensor:
        return (self._added / (self._added + self._kept)).flip(0).cpu()

    def own_error(self, sigma: Tensor) -> Tensor:
        kept = (1 - sigma).square()  # the velocity's error is that of the noise over 1 - s
        return kept if self.predicts_noise else kept + sigma.square()

    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        index, shape = timestep.long(), (-1, *[1] * (x.ndim - 1))
        a, b = (table[index].view(shape).float() for table in (self._kept, self._added))
        z = (a + b) * x
        out = self.denoise(model, z.to(features["embeds"].dtype), timestep, features).float()
        if self.predicts_noise:
            return out - (z - b * out) / a
        return (a + b) * out - (a - b) * z  # out = a eps - b x0

    def _shift(self, shift: float) -> None:
        raise UserError(
            f"sampling.shift: the noise levels of {self.family} are those of its timesteps, which no shift moves; "
            "remove it"
        )

    def _schedule(self, steps: int) -> Schedule:
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        levels = scheduler.config.num_train_timesteps
        if scheduler.config.timestep_spacing == "trailing" and levels % steps:
            fit = [n for n in range(1, levels + 1) if levels % n == 0]
            near = [str(n) for n in (*[n for n in fit if n < steps][-1:], *[n for n in fit if n > steps][:1])]
            raise UserError(
                f"sampling.steps and eval.steps: with timestep_spacing trailing diffusers' DDIM takes {steps} steps "
                f"that do not meet, for {steps} does not divide the model's {levels} timesteps; use {' or '.join(near)}"
            )
        scheduler.set_timesteps(steps)
        before = scheduler.timesteps - levels // steps
        final = scheduler.final_alpha_cumprod.double()
        last = torch.where(before >= 0, scheduler.alphas_cumprod.double()[before.clamp(min=0)], final)[-1:]
        kept = torch.cat([scheduler.alphas_cumprod.double()[scheduler.timesteps], last])
        a, b = kept.sqrt(), (1 - kept).clamp(min=0).sqrt()
        total = (a + b).tolist()
        return Schedule(b / (a + b), scheduler.timesteps, start=1 / total[0], end=total[-1])
