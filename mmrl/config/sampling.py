"""The section ``sampling`` of a recipe: denoising steps, or tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field, PositiveFloat, model_validator

from mmrl.config.section import Count, Fraction, Many, NonNegative, Options, Section


class Sde(Section):
    kind: Literal["flow", "cps", "dance", "linear", "ddim"] = "flow"
    """``linear`` is the noise of Flow-GRPO's and Flash-GRPO's code for Wan 2.1, which grows with the noise level."""
    noise_level: PositiveFloat = 0.7
    """``a`` of Flow-SDE and CPS, ``eta`` of DanceGRPO and DDIM (DDPO: 1), a factor of ``linear`` (1)."""


class Window(Section):
    """Train a few consecutive steps and sample the rest without noise (Flow-GRPO-Fast, MixGRPO)."""

    size: Count = 3
    """Steps that train."""
    first: Annotated[int, Field(ge=0)] = 0
    """The earliest step of a window."""
    last: Count | None = None
    """The window stays inside steps [first, last); None ends before the final step, which never carries noise."""
    strategy: Literal["random", "progressive", "decay", "exp_decay"] = "random"
    """``random`` draws the start anew each step; ``progressive`` moves it by one every ``every`` steps (MixGRPO);
    ``decay`` and ``exp_decay`` move it faster the later it is."""
    every: Count = 25
    """Training steps between two moves of the window."""
    decay_from: Annotated[int, Field(ge=0)] = 13
    """``exp_decay``: a window that begins here or earlier moves every ``every`` training steps."""
    decay_rate: NonNegative = 0.1
    """``exp_decay``: each denoising step after ``decay_from`` multiplies that number by ``exp(-decay_rate)``."""


class Size(NamedTuple):
    """Pixels of a picture, or of each frame of a clip."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height} x {self.width}"


Bucket = Annotated[list[Count], Field(min_length=2, max_length=2)]
"""Height and width."""
MOST_BUCKETS = 64


class Sampling(Section):
    """Denoising steps of a diffusion model."""

    left_to_plan = ("batch_size",)

    type: Literal["diffusion"] = "diffusion"
    """The pipeline chooses it."""
    steps: Annotated[int, Field(ge=2, le=10_000)] = 10
    """Denoising steps."""
    guidance_scale: NonNegative = 1.0
    """1 (or less) samples without classifier-free guidance, at half the cost. A policy gradient trains with the same
    scale, because it replays the sampled steps; a forward-process loss has its own scale (algorithm.guidance)."""
    guidance_scale_2: NonNegative | None = None
    """Of the model for low noise, where two models predict (Wan 2.2 A14B); None takes guidance_scale for both."""
    audio_guidance_scale: PositiveFloat | None = None
    """Of the sound, where a model makes it with the clip (LTX-2); None takes guidance_scale for both."""
    negative_prompt: str | None = None
    """The negative prompt of guidance, for prompts without a ``negative_prompt`` of their own. None: the default of the
    diffusers pipeline (the empty text; zeros for SDXL; a space for Qwen-Image)."""
    height: Count
    """Of a picture, in pixels."""
    width: Count
    """Of a picture, in pixels."""
    condition_size: Annotated[int, Field(ge=32)] | None = None
    """The picture that a prompt carries, where a family brings it to an area whatever ``height`` and ``width`` are
    (Qwen-Image-Edit): the side of a square of that area, in pixels. None: the diffusers pipeline's own, 1024. A smaller
    one makes a step cheaper: a picture of 1024 pixels is as many tokens as one that is made at 1024 x 1024."""
    pictures: Annotated[int, Field(ge=1, le=16)] | None = None
    """How many pictures every prompt carries, of a family that takes several (Qwen-Image-Edit-Plus); None: one."""
    image_crf: Annotated[int, Field(ge=0, le=51)] | None = None
    """How strongly the picture that a clip begins with is compressed (CRF of H.264) for a model that was trained on
    frames of films (ltx2_i2v), which needs PyAV. 0 leaves it as it is; None: the diffusers pipeline's own, 33."""
    held_frames: Annotated[int, Field(ge=2)] | None = None
    """How many frames of the clip that a prompt carries stay, and are gone on from (ltx2_v2v): its first ones, one more
    than a multiple of eight, fewer than ``frames``."""
    strength: Annotated[float, Field(gt=0, lt=1)] | None = None
    """How far a clip that a prompt carries is noised before it is denoised (wan_v2v; 0.8 is diffusers' default):
    ``steps`` times it, rounded down, are taken, the last ones of all. Steps that it leaves out are neither sampled nor
    trained, and ``window`` and the algorithm's steps count from the first that is taken."""
    buckets: Annotated[list[Bucket], Field(min_length=1, max_length=MOST_BUCKETS)] | None = None
    """Several sizes, ``[[64, 64], [48, 80]]``, height before width: each prompt is sampled at the one that fits its
    record's ``height`` and ``width``, its ``aspect_ratio``, or its picture. ``height`` and ``width`` are one of them,
    the first unless given, and the size of records that say nothing. None samples all prompts at ``height`` x
    ``width``."""
    frames: Count | None = None
    """Frames of a clip; None if the pipeline makes pictures."""
    frame_rate: PositiveFloat | None = None
    """Frames per second, where a model makes sound with the clip (LTX-2), which says how long the sound is; None: the
    diffusers pipeline's own, 24."""
    max_sequence_length: Annotated[int, Field(gt=0, le=8192)] = 256
    """Tokens of a prompt for the text encoders that take a limit (T5)."""
    shift: PositiveFloat | None = None
    """A fixed shift of the noise levels, s to shift s / (1 + (shift - 1) s); None takes the checkpoint's own, which may
    grow with the picture's size."""
    schedule: Literal["euler", "checkpoint"] = "euler"
    """If a checkpoint names a solver of higher order (Wan, Sana): ``euler`` takes the noise levels of the flow-matching
    Euler scheduler, ``checkpoint`` those of that solver. ``solver`` takes the steps in both cases."""
    solver: Literal["euler", "dpmsolver++"] = "euler"
    """What takes the steps without noise, in training and in evaluation. ``dpmsolver++`` is of second order (2M) and
    calls the model once a step, as Euler does, so that fewer steps suffice (DiffusionNFT)."""
    sde: Sde = Sde()
    """How noise is added in a step that trains."""
    window: Window | None = None
    """None records every step except the last."""
    batch_size: Many | None = None
    """None, or ``auto``, takes train.micro_batch_size: equal shapes make the first ratio exactly 1."""
    same_initial_noise: bool = False
    """Start all samples of a group from the same noise (DanceGRPO). The denoising steps before ``window`` are then
    computed once for a group."""

    @model_validator(mode="before")
    @classmethod
    def _default_size(cls, given: object) -> object:
        """Take the first bucket as the size where neither height nor width is given."""
        if not isinstance(given, Mapping) or given.get("height") is not None or given.get("width") is not None:
            return given
        match given.get("buckets"):
            case [[height, width], *_]:
                return {**given, "height": height, "width": width}
            case _:
                return given

    def takes(self, steps: int) -> int:
        """How many of ``steps`` denoising steps are taken."""
        return steps if self.strength is None else int(steps * self.strength)

    @property
    def taken(self) -> int:
        """``takes`` of ``steps``."""
        return self.takes(self.steps)

    @property
    def size(self) -> Size:
        """The size of prompts whose records name none."""
        return Size(self.height, self.width)

    @property
    def sizes(self) -> list[Size]:
        """All sizes that may be sampled."""
        return [self.size] if self.buckets is None else [Size(*bucket) for bucket in self.buckets]


def shares_steps(sampling: Sampling | TextSampling, group_size: int) -> bool:
    """Whether the samples of a group have their denoising steps before the window in common."""
    return sampling.type == "diffusion" and sampling.same_initial_noise and bool(sampling.window) and group_size > 1


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Picture(Section):
    """A picture that the policy writes, token by token, in place of a text."""

    height: Count
    """In pixels."""
    width: Count
    """In pixels."""
    guidance_scale: Annotated[float, Field(ge=1)] = 1.0
    """1 samples without classifier-free guidance. A larger one takes two forwards, of the prompt and of the negative
    prompt, in sampling and in training: tokens are drawn from the guided distribution, and log-probs are of it."""
    negative_prompt: str | None = None
    """What guidance moves away from, for prompts without a ``negative_prompt`` of their own. Such models have no
    default; the empty text leaves the prompt out."""


class TextSampling(Section):
    """Tokens of a language or vision-language model. The key ``max_new_tokens`` marks this kind of section."""

    left_to_plan = ("batch_size",)

    type: Literal["text"] = "text"
    """The pipeline chooses it."""
    max_new_tokens: Count
    """Tokens of a response at most."""
    max_prompt_tokens: Count | None = None
    """data.overlong decides about longer prompts; None allows the model's context minus max_new_tokens."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it, in sampling and in log-probs."""
    top_p: Annotated[Fraction, Field(gt=0)] = 1.0
    """Below 1, log-probs are still those of the whole distribution, with the tokens that are left out."""
    top_k: Count | None = None
    """Draw from so many of the likeliest tokens; log-probs as with top_p."""
    min_p: Fraction = 0.0
    """Leaves out tokens less likely than this share of the likeliest; log-probs as with top_p."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1 makes tokens of prompt and response less likely to be repeated. Log-probs in process are without it."""
    min_new_tokens: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Least tokens of a response: before, no stop token is drawn and no stop string ends it."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_listed)] = Field(default_factory=list)
    """Texts that end a response. The response keeps them; text after them in the same token is cut."""
    batch_size: Many | None = None
    """Samples generated at once; None, or ``auto``, takes train.micro_batch_size. Where the plan chooses that, it
    chooses this one by the memory of sampling, too."""
    system: str | None = None
    """A system message for prompts without one."""
    chat_template_kwargs: Options = Field(default_factory=dict)
    """Variables of the model's chat template (``enable_thinking: false``)."""
    picture: Picture | None = None
    """Of a model that writes pictures as tokens (llm/emu3): the size of each, and its guidance. ``max_new_tokens`` is
    then the number of tokens of a picture, which ``mmrl plan`` says. None: the model writes text."""


def kind_of(sampling: object) -> str:
    """The kind of the section ``sampling``: ``text`` if it has ``max_new_tokens``, else ``diffusion``."""
    if isinstance(sampling, Mapping):
        return str(sampling.get("type", "text" if "max_new_tokens" in sampling else "diffusion"))
    return "text" if isinstance(sampling, TextSampling) else "diffusion"
