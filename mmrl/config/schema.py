"""The recipe: everything a run depends on, as frozen pydantic models. Imports no torch.

The defaults of an algorithm's section are the settings of its paper; what a recipe writes is visibly its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Dtype = Literal["float32", "bfloat16", "float16"]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a recipe: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Lora(Section):
    """Low-rank adapters on the policy's linear layers; the base weights never move."""

    rank: PositiveInt = 32
    alpha: PositiveFloat = 64.0
    targets: list[str] | None = None
    """Names of the modules that take an adapter; None takes the pipeline's own list."""
    init: Literal["gaussian", "default"] = "gaussian"


class Model(Section):
    path: str
    """A local directory or a hub name in the library's own format; a path is looked up from the recipe's folder too."""
    dtype: Dtype = "float32"
    """Of the frozen weights. Trainable weights, step maths and log-probs are float32 whatever this says."""
    lora: Lora | None = None
    """None trains all weights of the policy."""
    gradient_checkpointing: bool = False
    offload: bool = True
    """Move text encoders and VAE off the accelerator while they are idle (no effect on a CPU)."""


class Data(Section):
    """A data set by name or path/to/file.py:function, and its keyword arguments."""

    name: str
    train: dict[str, Any] = Field(default_factory=dict)
    heldout: dict[str, Any] = Field(default_factory=dict)


class Sde(Section):
    kind: Literal["flow", "cps", "dance"] = "flow"
    noise_level: PositiveFloat = 0.7
    """``a`` of Flow-SDE and CPS, ``eta`` of DanceGRPO."""


class Window(Section):
    """Train a few consecutive steps and sample the rest without noise (Flow-GRPO-Fast, MixGRPO)."""

    size: PositiveInt = 3
    first: Annotated[int, Field(ge=0)] = 0
    last: PositiveInt | None = None
    """The window stays inside steps [first, last); None ends before the final step, which never carries noise."""
    strategy: Literal["random", "progressive"] = "random"
    """``random`` draws the start anew each step; ``progressive`` moves it by one every ``every`` steps (MixGRPO)."""
    every: PositiveInt = 25


class Sampling(Section):
    steps: Annotated[int, Field(ge=2)] = 10
    guidance_scale: NonNegative = 1.0
    """1 (or less) samples and trains without classifier-free guidance, at half the cost."""
    height: PositiveInt
    width: PositiveInt
    max_sequence_length: PositiveInt = 256
    sde: Sde = Sde()
    window: Window | None = None
    """None records every step but the last."""
    batch_size: PositiveInt | None = None
    """None takes train.micro_batch_size: equal shapes make the first ratio exactly 1."""
    same_initial_noise: bool = False
    """Start the samples of a group from one noise (DanceGRPO)."""


class Reward(Section):
    name: str
    """``shapes``, ``jpeg:compressibility``, ``path/to/my.py:name``."""
    label: str | None = None
    """What metrics and reports call it; None takes the last part of ``name``."""
    weight: float = 1.0
    normalize: Literal["none", "batch", "group"] = "none"
    """Divide by the batch's standard deviation, or standardise inside each group, before weighting."""
    batch_size: PositiveInt | None = None
    timeout: PositiveFloat = 60.0
    """Seconds for one batch."""
    retries: Annotated[int, Field(ge=0)] = 0
    on_failure: Literal["fail", "drop"] = "fail"
    """Stop the run, or leave the sample out of the update (counted, named in failures.jsonl). Never a silent 0."""
    options: dict[str, Any] = Field(default_factory=dict)


class FlowGRPO(Section):
    """Clipped policy gradient over denoising steps (Liu et al. 2025, arXiv 2505.05470)."""

    type: Literal["flow_grpo"] = "flow_grpo"
    clip_range: PositiveFloat = 1e-4
    advantage_clip: PositiveFloat = 5.0
    advantage_std: Literal["group", "batch", "none"] = "batch"
    """Divide the centred reward by the group's standard deviation or by the batch's (Flow-GRPO's default)."""
    kl_coef: NonNegative = 0.04


class DiffusionNFT(Section):
    """Forward-process optimisation (Zheng et al. 2025, arXiv 2509.16117)."""

    type: Literal["diffusion_nft"] = "diffusion_nft"
    beta: PositiveFloat = 1.0
    advantage_clip: PositiveFloat = 5.0
    advantage_std: Literal["group", "batch", "none"] = "batch"
    kl_coef: NonNegative = 1e-4
    """Weight of the squared distance to the reference's velocity."""
    old_decay_rate: NonNegative = 0.001
    old_decay_max: Fraction = 0.5
    """After step n the old policy becomes d * old + (1 - d) * policy, d = min(rate * n, max)."""
    noise_levels: PositiveInt | None = None
    """Noise levels trained per sample; None takes every rollout step but the last."""


class DRaFT(Section):
    """Reward back-propagation through the last K steps (Clark et al. 2023, arXiv 2309.17400)."""

    type: Literal["draft"] = "draft"
    last_steps: PositiveInt = 1


Algorithm = Annotated[FlowGRPO | DiffusionNFT | DRaFT, Field(discriminator="type")]


class Train(Section):
    steps: PositiveInt
    prompts_per_step: PositiveInt
    group_size: PositiveInt
    micro_batch_size: PositiveInt
    updates_per_step: PositiveInt = 1
    max_cpu_seconds: PositiveFloat | None = None
    """Stop after the step in which the CPU time spent in training steps (not in evaluation) passes this."""


class Optim(Section):
    lr: PositiveFloat = 3e-4
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegative = 1e-4
    max_grad_norm: PositiveFloat = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear"] = "constant"
    """``linear`` falls from the first update to 0 at train.steps; the warm-up multiplies it."""
    ema_decay: Decay | None = None
    """Keep an exponential moving average of the weights and evaluate and export that; None evaluates the weights."""
    ema_every: PositiveInt = 1


class Eval(Section):
    """Held-out prompts with fixed seeds: the curve, the grids and the before/after of the report."""

    every: PositiveInt | None = 10
    samples: PositiveInt = 64
    steps: PositiveInt | None = None
    """Denoising steps of evaluation; None takes sampling.steps. Always without noise."""
    grid: PositiveInt = 24
    """Pictures in a sample grid."""
    rewards: list[Reward] = Field(default_factory=list)
    """Measured on held-out samples and never trained on; the training rewards are always measured too."""


class Checkpoint(Section):
    every: PositiveInt = 10
    keep: PositiveInt = 2


class Recipe(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    seed: Annotated[int, Field(ge=0)] = 0
    pipeline: str
    """``diffusion/sd3``, or path/to/file.py."""
    model: Model
    data: Data
    sampling: Sampling
    rewards: Annotated[list[Reward], Field(min_length=1)]
    algorithm: Algorithm
    train: Train
    optim: Optim = Optim()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    device: str = "auto"
    """``auto`` takes an accelerator where there is one; ``cpu``, ``cuda:1`` say which."""
    threads: PositiveInt | None = 1
    """CPU threads of the process; None leaves torch's choice."""
    log: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Trackers beside metrics.jsonl; each needs its extra (pip install mmrl[wandb])."""
    architecture: str | None = None
    """A JSON file with the checkpoint's component configurations, read by ``plan`` where the checkpoint cannot be."""

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        from mmrl.config.checks import impossibilities

        found = impossibilities(self)
        if found:
            raise ValueError("\n".join(found))
        return self
