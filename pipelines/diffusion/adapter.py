"""The base class of adapters: what differs between families of diffusion models, over a loaded diffusers pipeline.

States are in flow coordinates for every family, ``x_s = (1 - s) x0 + s eps`` with the velocity ``eps - x0``. Families
that predict the noise of ``a x0 + b eps`` with ``a^2 + b^2 = 1`` (``noise_prediction.py``) are in them after a division
by ``a + b``: samplers and objectives need no word about them.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import diffusers  # its parts are loaded when they are first used
import torch
from PIL import Image
from torch import Tensor, nn

from mmrl.config.sampling import Sampling, Size
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.media import Media
from mmrl.core.trajectory import Prompt

from .fields import Width, check_flow
from .pictures import clip_of, first_frames, fitted, frames, scaled, sources_of

Conditions = dict[str, Tensor | dict[str, Tensor]]
"""Arguments of a model besides latents and timestep."""


class Schedule(NamedTuple):
    """Denoising from ``start`` times Gaussian noise to what, times ``end``, is the clean latent."""

    sigmas: Tensor
    """``[steps + 1]``, falling."""
    timesteps: Tensor
    """``[steps]``, as the model takes them, on its device."""
    start: float = 1.0
    end: float = 1.0


class Read(NamedTuple):
    """The tokens of a prompt for a text encoder, special ones included, and the most that the encoder reads."""

    tokens: int
    most: int


def by_channel(values: Sequence[float] | Tensor, like: Tensor) -> Tensor:
    """A number for each channel, to compute with latents ``like`` ``[B, C, ...]``."""
    return torch.as_tensor(values).view(-1, *[1] * (like.ndim - 2)).to(like)


def clip_reads(text: str, tokenizers: Mapping[str, Any], t5: str = "", most: int = 0) -> list[Read]:
    """What CLIP encoders read of ``text``, and the encoder ``t5``, which reads ``most`` tokens."""
    counts = {name: len(tokenizer(text, verbose=False).input_ids) for name, tokenizer in tokenizers.items()}
    return [Read(n, most if name == t5 else tokenizers[name].model_max_length) for name, n in counts.items()]


class Adapter(ABC):
    """A family (abstract): how to encode, predict and decode, what takes LoRA, which sizes are allowed."""

    makes: ClassVar[Literal["image", "video"]] = "image"
    edits: ClassVar[bool] = False
    """Whether every prompt carries a picture, which is edited or which a clip begins with (``encode_source``)."""
    sees: ClassVar[str | None] = None
    """The component that prepares the picture for the text encoder, of a family whose text encoder sees it
    (``encode_seen``); the plan makes the pipeline without it."""
    condition: ClassVar[int | None] = None
    """The side of a square with the area of the picture that is edited, in pixels; None: it has the size that is
    sampled."""
    several: ClassVar[bool] = False
    """Whether a prompt may carry several pictures (``sampling.pictures``)."""
    masks: ClassVar[bool] = False
    """Whether the model picks tokens by masks, so that how many there are depends on what is in them."""
    clips: ClassVar[bool] = False
    """Whether a prompt carries a clip in place of a picture: what sampling ``starts`` from, or else whose first
    ``sampling.held_frames`` frames stay in every step."""
    starts: ClassVar[bool] = False
    """Whether sampling starts from the clip of a prompt, noised as far as ``sampling.strength`` says (``started``)."""
    takes_noise: ClassVar[bool] = True
    """Whether the stock call takes initial noise as ``latents``; else it draws its own with ``randn_tensor``."""
    holds: ClassVar[bool] = False
    """Whether the latents of the picture that a clip begins with stay in every step: states are of the rest."""
    family: ClassVar[str]
    """The models' name, for messages."""
    pipeline: ClassVar[str]
    """The class of diffusers."""
    saved_as: ClassVar[tuple[str, ...]] = ()
    """Further classes of diffusers, whose checkpoints it loads."""
    trains: ClassVar[str] = "transformer"
    """The component that predicts."""
    also_trains: ClassVar[tuple[str, ...]] = ()
    """Further components that predict, each at times of its own (``expert``), and train beside it."""
    encoders: ClassVar[tuple[str, ...]]
    """Components that encode text, and an ``image_encoder`` that encodes the picture of a prompt; those a checkpoint
    lacks are left out."""
    connects: ClassVar[tuple[str, ...]] = ()
    """Components that encode what ``encoders`` have read further."""
    compresses: ClassVar[bool] = False
    """Whether the picture that a clip begins with is compressed before it is encoded (``sampling.image_crf``)."""
    sounds: ClassVar[tuple[str, ...]] = ()
    """Components that make sound of latents (``decode_sound``), of a family whose states are of a clip and of its
    sound; they are kept with the VAE."""
    shows: ClassVar[str] = "image_processor"
    """The component that makes the pixels of an ``image_encoder``."""
    guider: ClassVar[str | None] = None
    """The component that combines two predictions, of a pipeline whose call takes no scale; ``prepare`` sets it."""
    sized: ClassVar[bool] = True
    """Whether the stock call takes a height and a width."""
    may_lack: ClassVar[tuple[str, ...]] = ()
    """Those of ``encoders`` that a checkpoint may be without."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Components that are not loaded: a checker of contents, an encoder of pictures."""
    options: ClassVar[dict[str, Json]] = {}
    """Further arguments of the class of diffusers."""
    index: ClassVar[Mapping[str, tuple[Json, ...]]] = {}
    """Fields of ``model_index.json`` that the class of diffusers does not read, each with the values of a checkpoint
    that this family draws with."""
    fixed: ClassVar[Mapping[str, tuple[Json, ...]]] = {}
    """Fields of the configuration of ``trains``, each with the values that this family draws with. Others are of models
    that take inputs which the family has not."""
    statistics: ClassVar[tuple[str, ...]] = ("scaling_factor",)
    """Fields of the VAE's configuration that latents are scaled by."""
    lora_targets: ClassVar[tuple[str, ...]]
    lora_file: ClassVar[Literal["kohya", "diffusers"] | None] = None
    """How other programs that draw name the weights of a LoRA of this family; None where that was not looked up."""
    negative: ClassVar[str] = ""
    """The prompt that guidance moves away from where the user gives none."""

    def __init__(self, pipe: diffusers.DiffusionPipeline, sampling: Sampling, device: torch.device) -> None:
        self.pipe, self.sampling, self.device = pipe, sampling, device
        found = [getattr(pipe, name, None) for name in (*self.encoders, *self.connects)]
        self.text_encoders: list[nn.Module] = [encoder for encoder in found if encoder is not None]
        self.vae: nn.Module = (
            nn.ModuleList([pipe.vae, *(getattr(pipe, name) for name in self.sounds)]) if self.sounds else pipe.vae
        )
        self._check_scheduler()
        self._check_settings(sampling)
        if sampling.shift is not None:
            self._shift(sampling.shift)
        self._schedules: dict[int, Schedule] = {}
        self._at: dict[Size, Self] = {}

    def _check_settings(self, sampling: Sampling) -> None:
        """Raises ``UserError`` for a setting that the family has no use for, or that it needs and is not there."""
        holds_clip = self.clips and not self.starts
        for key, takes, why in (
            ("guidance_scale_2", self.also_trains, " has one model that predicts, and it has sampling.guidance_scale"),
            ("condition_size", self.condition, ": a prompt's picture has the size that is sampled"),
            ("pictures", self.several, ": a prompt carries one picture"),
            ("strength", self.starts, ": it starts from noise alone"),
            ("held_frames", holds_clip, ": no frames of a prompt's clip stay"),
            ("audio_guidance_scale", self.sounds, " makes no sound"),
            ("frame_rate", self.sounds, " makes no sound"),
            ("image_crf", self.compresses, " compresses no pictures"),
        ):
            if getattr(sampling, key) is not None and not takes:
                shown = key not in ("condition_size", "pictures") or self.edits
                raise UserError(
                    f"sampling.{key}: {self.family}{why if shown else ': it is shown no pictures'}; remove {key}"
                )
        if self.starts and sampling.strength is None:
            edit = "say how far the clip of a prompt is noised; diffusers' default is 0.8"
            raise UserError(f"sampling.strength: {self.family}: {edit}")
        if holds_clip and sampling.held_frames is None:
            raise UserError(f"sampling.held_frames: {self.family}: say how many frames of the clip of a prompt stay")

    def at(self, size: Size) -> Self:
        """This adapter with ``size`` for the height and width of ``sampling``, over the same components."""
        if size == self.sampling.size:
            return self
        if size not in self._at:
            self._at[size] = other = copy.copy(self)
            other.sampling = self.sampling.model_copy(update=size._asdict())
            other._schedules, other._at = {}, {}
        return self._at[size]

    @classmethod
    def trained(cls) -> tuple[str, ...]:
        """All components that predict and train."""
        return (cls.trains, *cls.also_trains)

    @classmethod
    def tokenizer_of(cls, encoder: str) -> str:
        """The component that makes the tokens of a text encoder, or the pixels of an image encoder."""
        return encoder.replace("text_encoder", "tokenizer").replace("image_encoder", cls.shows)

    def weights_without_gradient(self) -> dict[str, str]:
        """Parts of names of weights, whole between dots, that the architecture never reads, each with the reason. Other
        weights that train and get no gradient stop the run."""
        return {}

    @property
    def model(self) -> nn.Module:
        """The model that predicts, without adapters."""
        return getattr(self.pipe, self.trains)

    def expert(self, timestep: float) -> str:
        """The component that predicts at a timestep."""
        return self.trains

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

    def guide(self, negative: Tensor, positive: Tensor, scale: float | Tensor) -> Tensor:
        """One velocity of two, ``[B, ...]``, with guidance ``scale``."""
        return negative + scale * (positive - negative)

    def scale(self, timestep: Tensor, scale: float) -> float | Tensor:
        """The scale of guidance at timesteps ``[B]``, for which sampling or a loss has ``scale``; to multiply
        velocities by."""
        return scale

    @classmethod
    def widths(cls, pipe: diffusers.DiffusionPipeline) -> Iterator[Width]:
        """Fields of the configuration of ``trains`` that other components decide: the name, the value, the value that
        fits, and what it must fit."""
        yield from ()

    @abstractmethod
    def encode(self, text: str) -> dict[str, Tensor]:
        """Features of one prompt, each without a batch dimension, and of the same shape for every prompt."""

    def encode_seen(self, text: str, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """``encode`` of a prompt, or of a negative prompt, beside what is edited, of ``source_size``: for a family that
        ``sees`` it."""
        raise NotImplementedError

    @property
    def pictures(self) -> int:
        """How many pictures every prompt carries."""
        return (self.sampling.pictures or 1) if self.edits else 0

    @property
    def source_size(self) -> Size:
        """To which size a picture that a prompt carries is scaled and cut."""
        return self.sampling.size

    def check_sources(self, prompt: Prompt) -> Sequence[Media]:
        """The pictures or the clip that ``prompt`` carries. Raises ``BadPromptError`` where they are not what the
        family takes."""
        if self.clips:
            return [clip_of(prompt, self.source_size, self.sampling)]
        return sources_of(prompt, self.pictures)

    def sources(self, prompt: Prompt) -> list[Image.Image]:
        """The pictures that ``prompt`` carries, or the frames of its clip, of ``source_size``. Raises
        ``BadPromptError``."""
        found = self.check_sources(prompt)
        if self.clips and (held := self.sampling.held_frames):
            return first_frames(prompt, found[0], self.source_size, held)
        if self.clips:
            return frames(prompt, found[0], self.source_size, self.sampling.frames or 1)
        return [fitted(prompt, medium, self.source_size) for medium in found]

    def given_sources(self, sources: list[Image.Image]) -> dict[str, Any]:
        """Arguments of the stock pipeline's call for ``sources``."""
        if self.clips:
            return {"video": sources}
        return {"image": sources if self.several else sources[0]} if self.edits else {}

    def opened(self) -> tuple[str, str]:
        """Python of a model card that opens ``sources``: what it imports, and the argument of the stock call."""
        if self.clips:
            return "from diffusers.utils import load_video\n", f'video=load_video("clip.mp4")[:{self.sampling.frames}]'
        if not self.edits:
            return "", ""
        height, width = self.source_size
        names = [f"picture{n + 1}.png" if self.several else "picture.png" for n in range(self.pictures)]
        found = [f'Image.open("{name}").resize(({width}, {height}))' for name in names]
        shown = f"[{', '.join(found)}]" if self.several else found[0]
        return "from PIL import Image\n", f"image={shown}"

    def encode_source(self, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """Features of ``sources``: the clean latent, ``[n, ...]`` of several."""
        found = [self.encode_image(scaled(one).unsqueeze(0).to(self.device))[0].float() for one in pictures]
        return {"source": torch.stack(found) if len(found) > 1 else found[0]}

    def read(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        """How many tokens ``text`` has for each text encoder, and how many that encoder reads; ``tokenizers`` by the
        encoder's name. Empty: not known."""
        return []

    def _reads(self, text: str, tokenizer: Any, before: int = 0) -> list[Read]:
        """What one encoder reads of ``text``, not counting the ``before`` tokens of a template."""
        count = len(tokenizer(text, verbose=False).input_ids) - before
        return [Read(count, self.sampling.max_sequence_length)]

    def read_negative(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        """``read`` a negative prompt that the user gives."""
        return self.read(text, tokenizers)

    def encode_negative(self, text: str) -> dict[str, Tensor]:
        """``encode`` a negative prompt that the user gives, as the stock call does with ``negative_prompt``.
        Where nobody gives one, guidance moves away from ``encode(self.negative)``."""
        return self.encode(text)

    @property
    def patch(self) -> int:
        """The side of what the model takes as one token, in latents; a size is a multiple of it."""
        return getattr(self.pipe, self.trains).config.patch_size

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """The shape of one sample. Raises ``UserError`` if the family cannot make this size."""
        factor = self.pipe.vae_scale_factor
        self._fits(height, width, factor * self.patch)
        return (getattr(self.pipe, self.trains).config.in_channels, height // factor, width // factor)

    def started(self, noisy: Tensor, features: dict[str, Tensor], start: float) -> Tensor:
        """What is denoised first, of initial noise ``[B, ...]`` times the schedule's ``start``; ``features`` of the
        prompts are last in a batch with negative ones."""
        return noisy

    @abstractmethod
    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        """Velocity for latents ``[B, ...]`` in flow coordinates, under batched features."""

    def whole(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        """Clean states ``[B, ...]`` with what is held beside them, to decode; ``features`` of the prompts are last in
        a batch with negative ones."""
        return latents

    def free(self, latents: Tensor) -> Tensor:
        """What of ``whole`` latents is the state."""
        return latents

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures ``[B, 3, H, W]``, or clips ``[B, F, 3, H, W]``, in [-1, 1], of clean latents."""
        made = self.pipe.vae.decode(self._as_vae_has(latents), return_dict=False)[0]
        return made if self.makes == "image" else made.transpose(1, 2)

    def modalities(self, states: Tensor) -> dict[str, Tensor]:
        """States ``[B, ...]`` of a clip with sound, divided into ``video`` and ``audio``."""
        raise NotImplementedError

    def decode_sound(self, latents: Tensor) -> Tensor:
        """The sound ``[B, channels, N]`` in [-1, 1] of clean latents, ``sound_rate`` numbers a second."""
        raise NotImplementedError

    @property
    def sound_rate(self) -> int:
        raise NotImplementedError

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Clean latents of pictures ``[B, 3, H, W]``, or clips ``[B, F, 3, H, W]``, in [-1, 1], the inverse of
        ``decode``: the mode of the VAE's distribution."""
        given = pixels if self.makes == "image" else pixels.transpose(1, 2)
        return self._as_model_sees(self.pipe.vae.encode(given).latent_dist.mode())

    def _as_vae_has(self, latents: Tensor) -> Tensor:
        """The VAE's latents, of those that the model sees, by ``statistics``."""
        config = self.pipe.vae.config
        if "latents_mean" in self.statistics:
            return latents * by_channel(config.latents_std, latents) + by_channel(config.latents_mean, latents)
        return latents / config.scaling_factor + (config.shift_factor if "shift_factor" in self.statistics else 0.0)

    def _as_model_sees(self, latents: Tensor) -> Tensor:
        """The inverse of ``_as_vae_has``."""
        config = self.pipe.vae.config
        if "latents_mean" in self.statistics:
            return (latents - by_channel(config.latents_mean, latents)) / by_channel(config.latents_std, latents)
        shift = config.shift_factor if "shift_factor" in self.statistics else 0.0
        return (latents - shift) * config.scaling_factor

    def call(self) -> dict[str, Json]:
        """Arguments of the stock pipeline's call, besides prompt, steps and size, to sample as this adapter does."""
        return {"guidance_scale": self.sampling.guidance_scale}

    def call_negative(self, text: str) -> dict[str, str]:
        """Further arguments of that call for the negative prompt ``text``, as Python code; ``pipe`` is the stock
        pipeline in it."""
        return {"negative_prompt": json.dumps(text, ensure_ascii=False)}

    def given_noise(self, noise: Tensor) -> dict[str, Tensor]:
        """The arguments of that call for initial noise ``[B, ...]``, or what it draws for them where it takes none."""
        return {"latents": noise}

    def schedule(self, steps: int | None = None) -> Schedule:
        """The schedule of ``steps``, by default sampling's: all, or the last that ``sampling.strength`` takes."""
        steps = self.sampling.steps if steps is None else steps
        if steps not in self._schedules:
            made = self._schedule(steps)
            if first := steps - self.sampling.takes(steps):
                start = made.sigmas[first].item()
                made = Schedule(made.sigmas[first:], made.timesteps[first:], start)
            _check_levels(made.sigmas, steps)
            self._schedules[steps] = made._replace(timesteps=made.timesteps.to(self.device))
        return self._schedules[steps]

    def timestep(self, sigma: Tensor) -> Tensor:
        """The model's timestep at any sigma, both ``[B]``."""
        return sigma * self.pipe.scheduler.config.num_train_timesteps

    @property
    def predicts_velocity(self) -> bool:
        """Whether the model's own prediction is the velocity of flow matching."""
        return True

    def levels(self) -> Tensor:
        """The noise levels of the model's training timesteps, ``[N]`` float64, the noisiest first: with the scheduler's
        shift, but without one that grows with the picture."""
        config = self.pipe.scheduler.config
        shift = 1.0 if config.get("use_dynamic_shifting") else own_shift(config)
        count = config.num_train_timesteps
        even = torch.arange(count, 0, -1, dtype=torch.float64) / count
        return shift * even / (1 + (shift - 1) * even)

    def own_error(self, sigma: Tensor) -> Tensor:
        """The squared error of the model's own prediction over that of its velocity, at noise levels ``[B]``."""
        return torch.ones_like(sigma)

    def _check_scheduler(self) -> None:
        """Raises ``UserError`` where the checkpoint's scheduler says what the family's steps do not do."""
        check_flow(self.pipe.scheduler, self.family, self.pipeline)

    def _shift(self, shift: float) -> None:
        """Have the scheduler shift its sigmas by ``shift``. Raises ``UserError`` if the family has no shift."""
        scheduler = self.pipe.scheduler
        self.pipe.scheduler = type(scheduler).from_config(scheduler.config, use_dynamic_shifting=False, shift=shift)

    def _schedule(self, steps: int) -> Schedule:
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        scheduler.set_timesteps(steps, **self._spacing(steps))
        return Schedule(scheduler.sigmas, scheduler.timesteps)

    def _spacing(self, steps: int) -> dict[str, Json]:
        """Arguments of the stock pipeline for the scheduler's ``set_timesteps``, besides the number of steps."""
        return {}

    def _latent_frames(self, time: int) -> int:
        """How many frames the latents of a clip have, each but the first for ``time`` frames. Raises ``UserError``
        where those of ``sampling.frames`` are another number."""
        frames = self.sampling.frames or 1
        if (frames - 1) % time:
            raise UserError(
                f"sampling.frames: {frames} is not one more than a multiple of {time}, which this checkpoint's VAE "
                f"needs; use {(frames - 1) // time * time + 1}"
            )
        return (frames - 1) // time + 1

    def _fits(self, height: int, width: int, multiple: int) -> None:
        """Raises ``UserError`` unless both are multiples."""
        if height % multiple or width % multiple:
            raise UserError(
                f"sampling.height and sampling.width: {height} x {width} is no multiple of {multiple}, which this "
                f"checkpoint's VAE and patches need; use {_near(height, multiple)} x {_near(width, multiple)}"
            )


def _check_levels(sigmas: Tensor, steps: int) -> None:
    """Raises ``UserError`` where noise levels do not fall from 1 or less to 0 or more."""
    falls = bool((sigmas.diff() < 0).all())
    if not (falls and bool(sigmas.isfinite().all()) and sigmas[-1] >= 0 and sigmas[0] <= 1 + 1e-6):
        shown = ", ".join(f"{level:.3g}" for level in sigmas[:4].tolist())
        raise UserError(
            f"model.path: over {steps} steps the noise levels of this checkpoint's scheduler are {shown} ..., and they "
            "must fall from 1 to 0; correct scheduler/scheduler_config.json (shift, shift_terminal, use_karras_sigmas, "
            "use_exponential_sigmas), or change sampling.steps"
        )


def shift_key(config: JsonObject) -> str:
    """The name of the shift in the configuration of diffusers' solvers, or of its Euler scheduler."""
    return "flow_shift" if "flow_shift" in config else "shift"


def own_shift(config: JsonObject) -> float:
    """The shift of a scheduler's configuration; 1 where it has none."""
    shift = config.get(shift_key(config))
    return shift if isinstance(shift, int | float) and shift else 1.0


def _near(size: int, multiple: int) -> int:
    return max(multiple, round(size / multiple) * multiple)
