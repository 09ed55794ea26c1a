"""The recipe: everything a run depends on, as frozen pydantic models. Imports no torch; reading a recipe does, with the
algorithm that it names.

The defaults of an algorithm's section are the settings of its paper; what a recipe writes is visibly its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PositiveFloat,
    SerializeAsAny,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from mmrl.algorithms.settings import AlgorithmSettings
from mmrl.config.adapters import with_adapters_settings
from mmrl.config.algorithms import as_settings, samples_nothing
from mmrl.config.chat_template import checked
from mmrl.config.data import Data, without_name
from mmrl.config.dtype import Dtype, with_choice
from mmrl.config.older_keys import renamed
from mmrl.config.performance import Performance
from mmrl.config.placement import Placement, placement_settings
from mmrl.config.rollout import Partial, Rollout
from mmrl.config.runtime import Features, Runtime
from mmrl.config.sampling import Sampling, Sde, TextSampling, Window, kind_of
from mmrl.config.section import (
    MOST_REWARDS,
    Count,
    Decay,
    Duration,
    Few,
    Fraction,
    Many,
    NonNegative,
    Options,
    Section,
)

__all__ = [
    "Partial",
    "Rollout",
    "Sampling",
    "Sde",
    "Section",
    "TextSampling",
    "Window",
]

Makes = Literal["text", "image", "video"]
"""What a pipeline's samples are."""


class Lora(Section):
    """Low-rank adapters on the policy's linear layers; the base weights never move."""

    rank: Count = 32
    alpha: PositiveFloat = 64.0
    targets: list[str] | None = None
    """Names of the modules that take an adapter; None takes the pipeline's own list."""
    init: Literal["gaussian", "default"] = "gaussian"
    path: str | None = None
    """A folder that peft wrote (or a LoRA of diffusers): training goes on with that adapter, whose rank, alpha and
    targets are taken. The reference is then the model with the adapter as it was."""

    @model_validator(mode="before")
    @classmethod
    def _as_saved(cls, values: object) -> object:
        return with_adapters_settings(values) if isinstance(values, Mapping) else values


class Model(Section):
    path: str
    """A local directory or a hub name in the library's own format; a path is looked up from the recipe's folder too."""
    dtype: Dtype = "float32"
    """Of the frozen weights. Trainable weights, step maths and log-probs are float32 whatever this says. ``auto`` is
    bfloat16 where the device has instructions for it and float32 elsewhere; a recipe that was read has one of them."""
    lora: Lora | None = None
    """None trains all weights of the policy."""
    gradient_checkpointing: bool = False
    freeze: list[str] = Field(default_factory=list)
    """Names of modules (``visual``) whose weights do not train; with LoRA only adapters train anyway."""
    chat_template: Annotated[str, AfterValidator(checked)] | None = None
    """Text: a Jinja template, or a file with one, in place of the checkpoint's. Exports keep it."""
    min_pixels: Count | None = None
    max_pixels: Count | None = None
    """Of a picture in a prompt, after the processor has resized it (Qwen-VL); None keeps the checkpoint's limits."""
    offload: bool = True
    """Move text encoders and VAE off the accelerator while they are idle (no effect on a CPU)."""

    @property
    def continues_adapter(self) -> bool:
        """Whether training begins with a saved adapter."""
        return self.lora is not None and self.lora.path is not None


class Reward(Section):
    name: str
    """``shapes``, ``jpeg:compressibility``, ``path/to/my.py:name``."""
    label: str | None = None
    """What metrics and reports call it; None takes the last part of ``name``."""
    weight: float = 1.0
    normalize: Literal["none", "batch", "group"] = "none"
    """Divide by the batch's standard deviation, or standardise inside each group, before weighting."""
    batch_size: Many | None = None
    timeout: PositiveFloat = 60.0
    """Seconds for one batch."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 0
    on_failure: Literal["fail", "drop"] = "fail"
    """Stop the run, or leave the sample out of the update (counted, named in failures.jsonl). Never a silent 0."""
    options: Options = Field(default_factory=dict)


class Scoring(Section):
    """What a training step does where rewards fail for many of its samples (docs/rewards.md)."""

    max_failed: Fraction = 0.25
    """Past this share of a step's samples without a score, or where none has one, the step waits and asks again.
    Rewards of weight 0 do not count."""
    patience: Duration = 600.0
    """How long it does so (``10m``, ``90s``, or seconds); then the run stops with exit code 3 and can be resumed."""


_NO_REWARDS = ()
"""In place of ``rewards``, which every recipe must have, in one whose algorithm samples nothing."""


def _none_asked(value: object, check: ValidatorFunctionWrapHandler) -> list[Reward]:
    return [] if value is _NO_REWARDS else check(value)


def _number_or_auto(value: object) -> object:
    if value != "auto" and not (isinstance(value, int) and value >= 1):  # said once, not for each part of the union
        raise ValueError(f"train.steps_per_forward: expected a whole number from 1 on or 'auto', got {value!r}")
    return value


class Train(Section):
    steps: Count
    prompts_per_step: Many
    group_size: Many
    micro_batch_size: Many
    """Samples of a slice of the update; of text at most, where ``micro_batch_tokens`` bounds it too."""
    micro_batch_tokens: Count | None = None
    """Text: longest prompt and response of a slice times its rows, padding included, stay within this."""
    steps_per_forward: Annotated[Count | Literal["auto"], BeforeValidator(_number_or_auto)] = 1
    """Pictures, policy gradients: recorded denoising steps of a micro-batch that go through the model in one forward,
    whose batch and memory are as many times as large. The gradient is the same. ``auto``: as many as pay and as memory
    has room for, which the plan settles (docs/speed.md)."""
    updates_per_step: Many = 1
    balance: Literal["predicted", "measured"] = "predicted"
    """Text, several controllers: the costs that divide prompts, a fixed table or fitted to seconds. With ``measured``
    two equal runs divide them differently, and differ in the last bits."""
    backend: Literal["replicated", "fsdp", "megatron"] = "replicated"
    """Of several devices, each holds all weights, gradients and optimizer state; its shard of them (FSDP2); or its part
    of every layer (Megatron-Core), where ``tensor_parallel`` devices of a controller compute a row together."""
    tensor_parallel: Few = 1
    sequence_parallel: bool = False
    """The devices of ``tensor_parallel`` also divide what layers keep between their parts, by tokens."""
    pipeline_parallel: Few = 1
    """Megatron-Core: stages of layers, each on ``tensor_parallel`` devices of the same controller, which slices of the
    update go through one behind the other."""
    pipeline_chunks: Few = 1
    """Stages are cut in so many, which a device has in turn (interleaved): it waits less, and sends more."""
    distributed_optimizer: bool = False
    """Megatron-Core: devices with the same weights divide Adam's moments and its step (ZeRO-1, arXiv 1910.02054)."""
    context_parallel: Few = 1
    """Text: devices of a controller that share each row of an update, a part of its tokens on each."""
    expert_parallel: Few = 1
    """Megatron-Core, mixtures of experts: devices of a controller that have different experts of each layer, and send
    one another the tokens that are for these."""

    @property
    def at_once(self) -> int:
        """``steps_per_forward`` as a number; ``auto`` is 1 until a plan has settled it."""
        return 1 if self.steps_per_forward == "auto" else self.steps_per_forward

    @property
    def sharing(self) -> int:
        """Devices that hold one model between them."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def width(self) -> int:
        """Devices that go through each slice of an update together."""
        return self.sharing * self.context_parallel

    def parts(self, ranks: int) -> int:
        """In how many parts the trained weights lie on ``ranks`` ranks, of which none share a model."""
        return ranks if self.backend == "fsdp" else 1

    max_cpu_seconds: PositiveFloat | None = None
    """Stop after the step in which the CPU time spent in training steps (not in evaluation) passes this. CPU time is
    measured: a run that this ends has other numbers of steps, and with a falling learning rate other weights, when it
    is repeated."""


class Optim(Section):
    lr: PositiveFloat = 3e-4
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegative = 1e-4
    max_grad_norm: PositiveFloat = 1.0
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """``linear`` falls from the first update to 0 at train.steps, or with train.max_cpu_seconds to nearly 0 where that
    ends the run before; the warm-up multiplies it. ``cosine`` is that of transformers: it rises from 0 and falls after
    the warm-up."""
    min_lr_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of optim.lr, what a falling rate ends at."""
    ema_decay: Decay | None = None
    """Keep an exponential moving average of the weights and evaluate and export that; None evaluates the weights."""
    ema_every: Count = 1


class EarlyStopping(Section):
    """End training where a held-out metric has ceased to rise. The checkpoint where it was best is kept, whatever
    ``checkpoint.keep`` says: ``--checkpoint best``."""

    metric: str
    """As in heldout.jsonl: ``reward/`` and the label of a reward, best one under ``eval.rewards``."""
    patience: Count = 3
    """Evaluations in a row that may be no better than the best."""
    threshold: NonNegative = 0.0
    """How much higher than the best counts as better."""


class Guards(Section):
    """Limits to what held-out samples show of over-optimisation (docs/reward_hacking.md). The figures are measured at
    every evaluation, whatever this says."""

    diversity_min: Fraction | None = 0.5
    """The least diversity of a prompt's samples, as a share of the base model's."""
    distance_max: PositiveFloat | None = None
    """The largest distance to the base model: of pixels in [0, 1], or nats per token of text."""
    untrained_drop: PositiveFloat | None = 0.5
    """How far a reward of eval.rewards may fall, in standard deviations of the base model's scores."""
    action: Literal["warn", "stop"] = "warn"
    """What becomes of a run that is beyond a limit for ``patience`` evaluations in a row."""
    patience: Count = 1


class Eval(Section):
    """Held-out prompts with fixed seeds: the curve, the grids and the before/after of the report."""

    every: Count | None = 10
    samples: Many = 64
    samples_per_prompt: Many = 1
    """So many of ``samples`` are of one prompt, in a row; ``samples`` is a multiple of it."""
    pass_at: Annotated[list[Many], Field(max_length=MOST_REWARDS)] = Field(default_factory=list)
    """``pass@k`` for each of these k (arXiv 2107.03374): whether one of k samples of a prompt is right, for each
    reward. Right is a sample whose part ``correct`` is 1, or without such a part one whose reward is 1 or more."""
    maj_at: Annotated[list[Many], Field(max_length=MOST_REWARDS)] = Field(default_factory=list)
    """Text: ``maj@k``, whether the answer of most of k samples is right, for each reward that says what the answer of a
    response is (``answer:*``; ``answer_of`` of a class)."""
    steps: Count | None = None
    """Denoising steps of evaluation; None takes sampling.steps. Always without noise."""
    temperature: NonNegative | None = None
    """Of text; 0 is greedy, None takes sampling.temperature."""
    grid: Many = 24
    """Pictures in a sample grid."""
    rewards: Annotated[list[Reward], Field(max_length=MOST_REWARDS)] = Field(default_factory=list)
    """Measured on held-out samples and never trained on; the training rewards are always measured too."""
    tuned_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of the denoising steps of evaluation, the first so many are the tuned model's and the others the base model's
    (MixGRPO's hybrid inference, arXiv 2507.21802), which lessens what reward hacking does to a picture. Needs LoRA."""
    early_stopping: EarlyStopping | None = None
    guards: Guards = Guards()


class Checkpoint(Section):
    every: Count = 10
    keep: Count = 2
    """The newest so many. With 1 the one before it stays until something finite was computed with the newest."""


class Recipe(Section):
    """Checks each section by itself; ``mmrl.config.checks`` finds what cannot work together."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    pipeline: str
    """``diffusion/sd3``, or path/to/file.py."""
    model: Model
    data: Data
    sampling: Annotated[
        Annotated[Sampling, Tag("diffusion")] | Annotated[TextSampling, Tag("text")], Discriminator(kind_of)
    ]
    rollout: Rollout = Rollout()
    rewards: Annotated[list[Reward], Field(min_length=1, max_length=MOST_REWARDS), WrapValidator(_none_asked)]
    """At least one; algorithms that train on pairs (dpo, reward_model) have none."""
    scoring: Scoring = Scoring()
    algorithm: Annotated[SerializeAsAny[AlgorithmSettings], BeforeValidator(as_settings)]
    """``type`` names the algorithm, a file of mmrl/algorithms or path/to/file.py:Class; the other keys are its own."""
    train: Train
    optim: Optim = Optim()
    performance: Performance = Performance()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    features: Features = Features()
    controllers: Few = 1
    """Processes that run the loop side by side, each on its own prompts and devices; more than one are Ray actors."""
    devices_per_controller: Few = 1
    """Of one host: GPUs, or processes of one thread each on CPUs."""
    placement: Annotated[Placement, BeforeValidator(placement_settings)] = Placement()
    """``colocate``, ``partial``, ``adaptive``, or a section."""
    ray: str = "local"
    """Where several controllers run: ``local`` starts Ray on this machine, ``auto`` or an address takes a cluster."""
    runtime: Runtime = Runtime()
    device: str = "auto"
    """``auto`` takes an accelerator where there is one; ``cpu``, ``cuda:1`` say which."""
    threads: Few | None = 1
    """CPU threads of the process; None leaves torch's choice."""
    profile: bool = False
    """Write a trace of the second and third step of a process, by torch's profiler, into the run's folder."""
    log: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Trackers beside metrics.jsonl; each needs its extra (pip install mmrl[wandb])."""
    architecture: str | None = None
    """A JSON file with the checkpoint's component configurations, read by ``plan`` where the checkpoint cannot be."""

    @property
    def makes(self) -> Makes:
        """What the pipeline's samples are, which the section ``sampling`` says."""
        if isinstance(self.sampling, TextSampling):
            return "text"
        return "image" if self.sampling.frames is None else "video"

    @property
    def replays_first(self) -> bool:
        """Whether old log-probs are recomputed, with a gradient: compiled code rounds half precision otherwise than
        without one, as sampling is."""
        half = self.performance.compile and self.model.dtype != "float32"
        return half and self.algorithm.kind == "policy_gradient"

    @property
    def denoising(self) -> Sampling:
        """The sampling section of a diffusion recipe. Raises ``TypeError`` for another."""
        if not isinstance(self.sampling, Sampling):
            raise TypeError(f"{self.name} samples text")
        return self.sampling

    @property
    def decoding(self) -> TextSampling:
        """The sampling section of a text recipe. Raises ``TypeError`` for another."""
        if not isinstance(self.sampling, TextSampling):
            raise TypeError(f"{self.name} samples pictures")
        return self.sampling

    @model_validator(mode="before")
    @classmethod
    def _given_texts_need_no_rewards(cls, values: object) -> object:
        if (
            isinstance(values, Mapping)
            and values.get("rewards") in (None, [])
            and samples_nothing(values.get("algorithm"))
        ):
            return {**values, "rewards": _NO_REWARDS}
        return values

    @model_validator(mode="before")
    @classmethod
    def _choose_dtype(cls, values: object) -> object:
        return with_choice(renamed(without_name(values))) if isinstance(values, Mapping) else values
