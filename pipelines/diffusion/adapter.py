"""The base class of adapters: what differs between families of diffusion models, over a loaded diffusers pipeline.

States are in flow coordinates for every family, ``x_s = (1 - s) x0 + s eps`` with the velocity ``eps - x0``. Families
that predict the noise of ``a x0 + b eps`` with ``a^2 + b^2 = 1`` (``noise_prediction.py``) are in them after a division
by ``a + b``: samplers and objectives need no word about them.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from mmrl.config.sampling import Sampling, Size
from mmrl.errors import UserError
from mmrl.json_types import Json

if TYPE_CHECKING:  # slow to import
    from diffusers import DiffusionPipeline, SchedulerMixin

Conditions = dict[str, Tensor | dict[str, Tensor]]
"""Arguments of a model besides latents and timestep."""
_SCHEDULER = "scheduler"


class Shown(Protocol):
    """The output of a stock pipeline: pictures or clips."""

    images: Tensor
    frames: Tensor


def set_scheduler(pipe: DiffusionPipeline, scheduler: SchedulerMixin) -> None:
    """Replace the scheduler of ``pipe``."""
    setattr(pipe, _SCHEDULER, scheduler)  # diffusers declares no components


class Schedule(NamedTuple):
    """Denoising from ``start`` times Gaussian noise to what, times ``end``, is the clean latent."""

    sigmas: Tensor
    """``[steps + 1]``, falling."""
    timesteps: Tensor
    """``[steps]``, as the model takes them, on its device."""
    start: float = 1.0
    end: float = 1.0


class Adapter(ABC):
    """A family (abstract): how to encode, predict and decode, what takes LoRA, which sizes are allowed."""

    makes: ClassVar[Literal["image", "video"]] = "image"
    edits: ClassVar[bool] = False
    """Whether every prompt carries the picture that is edited: ``features["source"]``, its clean latent."""
    family: ClassVar[str]
    """The models' name, for messages."""
    pipeline: ClassVar[str]
    """The class of diffusers."""
    trains: ClassVar[str] = "transformer"
    """The component that predicts."""
    encoders: ClassVar[tuple[str, ...]]
    """Components that encode text; those a checkpoint lacks are left out."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Components that are not loaded: a checker of contents, an encoder of pictures."""
    options: ClassVar[dict[str, Json]] = {}
    """Further arguments of the class of diffusers."""
    lora_targets: ClassVar[tuple[str, ...]]
    lora_file: ClassVar[Literal["kohya", "diffusers"] | None] = None
    """How other programs that draw name the weights of a LoRA of this family; None where that was not looked up."""
    negative: ClassVar[str] = ""
    """The prompt that guidance moves away from where the user gives none."""

    def __init__(self, pipe: DiffusionPipeline, sampling: Sampling, device: torch.device) -> None:
        self.pipe, self.sampling, self.device = pipe, sampling, device
        found = [getattr(pipe, name, None) for name in self.encoders]
        self.text_encoders: list[nn.Module] = [encoder for encoder in found if encoder is not None]
        self.vae: nn.Module = pipe.vae
        if sampling.shift is not None:
            self._shift(sampling.shift)
        self._schedules: dict[int, Schedule] = {}
        self._at: dict[Size, Self] = {}

    def at(self, size: Size) -> Self:
        """This adapter with ``size`` for the height and width of ``sampling``, over the same components."""
        if size == self.sampling.size:
            return self
        if size not in self._at:
            self._at[size] = other = copy.copy(self)
            other.sampling = self.sampling.model_copy(update=size._asdict())
            other._schedules, other._at = {}, {}
        return self._at[size]

    @property
    def model(self) -> nn.Module:
        """The model that predicts, without adapters."""
        return getattr(self.pipe, self.trains)

    @property
    def prepare(self) -> str:
        """Python that makes a stock ``pipe`` sample as this adapter does, if its own settings differ."""
        if self.sampling.shift is None:
            return ""
        return (
            "pipe.scheduler = type(pipe.scheduler).from_config(\n"
            f"    pipe.scheduler.config, use_dynamic_shifting=False, shift={self.sampling.shift}\n)\n"
        )

    @property
    def combines(self) -> bool:
        """Whether guidance combines two predictions, with the prompt and with ``negative``. Other models get the scale
        as an input, or need no guidance."""
        return True

    @property
    def guided(self) -> bool:
        """Whether sampling combines two predictions."""
        return self.combines and self.sampling.guidance_scale > 1

    def guide(self, negative: Tensor, positive: Tensor, scale: float) -> Tensor:
        """One velocity of two, ``[B, ...]``, with guidance ``scale``."""
        return negative + scale * (positive - negative)

    @abstractmethod
    def encode(self, text: str) -> dict[str, Tensor]:
        """Features of one prompt, each without a batch dimension, and of the same shape for every prompt."""

    def encode_negative(self, text: str) -> dict[str, Tensor]:
        """As ``encode``, of a negative prompt that the user gives, as the stock call does with ``negative_prompt``.
        Where nobody gives one, guidance moves away from ``encode(self.negative)``."""
        return self.encode(text)

    @abstractmethod
    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """The shape of one sample. Raises ``UserError`` if the family cannot make this size."""

    @abstractmethod
    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        """Velocity for latents ``[B, ...]`` in flow coordinates, under batched features."""

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures ``[B, 3, H, W]``, or clips ``[B, F, 3, H, W]``, in [-1, 1], of clean latents."""
        config = self.pipe.vae.config
        shift = config.get("shift_factor") or 0.0
        return self.pipe.vae.decode(latents / config.scaling_factor + shift, return_dict=False)[0]

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Clean latents of pictures ``[B, 3, H, W]`` in [-1, 1], the inverse of ``decode``: the mode of the VAE's
        distribution."""
        config = self.pipe.vae.config
        shift = config.get("shift_factor") or 0.0
        return (self.pipe.vae.encode(pixels).latent_dist.mode() - shift) * config.scaling_factor

    def shown(self, output: Shown) -> Tensor:
        """Pictures or clips in the output of the stock pipeline."""
        return output.images if self.makes == "image" else output.frames

    def call(self) -> dict[str, Json]:
        """Arguments of the stock pipeline's call, besides prompt, steps and size, to sample as this adapter does."""
        return {"guidance_scale": self.sampling.guidance_scale}

    def call_negative(self, text: str) -> dict[str, str]:
        """Further arguments of that call for the negative prompt ``text``, as Python code; ``pipe`` is the stock
        pipeline in it."""
        return {"negative_prompt": json.dumps(text, ensure_ascii=False)}

    def as_given(self, noise: Tensor) -> Tensor:
        """Initial noise ``[B, ...]`` as the stock pipeline's call takes ``latents``."""
        return noise

    def schedule(self, steps: int) -> Schedule:
        if steps not in self._schedules:
            made = self._schedule(steps)
            self._schedules[steps] = made._replace(timesteps=made.timesteps.to(self.device))
        return self._schedules[steps]

    def timestep(self, sigma: Tensor) -> Tensor:
        """The model's timestep at any sigma, both ``[B]``."""
        return sigma * self.pipe.scheduler.config.num_train_timesteps

    def _shift(self, shift: float) -> None:
        """Have the scheduler shift its sigmas by ``shift``. Raises ``UserError`` if the family has no shift."""
        scheduler = self.pipe.scheduler
        set_scheduler(self.pipe, type(scheduler).from_config(scheduler.config, use_dynamic_shifting=False, shift=shift))

    def _schedule(self, steps: int) -> Schedule:
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        scheduler.set_timesteps(steps, **self._spacing(steps))
        return Schedule(scheduler.sigmas, scheduler.timesteps)

    def _spacing(self, steps: int) -> dict[str, Json]:
        """Arguments of the stock pipeline for the scheduler's ``set_timesteps``, besides the number of steps."""
        return {}

    def _fits(self, height: int, width: int, multiple: int) -> None:
        """Raises ``UserError`` unless both are multiples."""
        if height % multiple or width % multiple:
            raise UserError(
                f"sampling.height and sampling.width: {height} x {width} is no multiple of {multiple}, which this "
                f"checkpoint's VAE and patches need; use {_near(height, multiple)} x {_near(width, multiple)}"
            )


def _near(size: int, multiple: int) -> int:
    return max(multiple, round(size / multiple) * multiple)
