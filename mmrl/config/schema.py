"""The recipe: everything a run depends on, as frozen pydantic models. Importing this module does not import torch;
reading a recipe does, for its algorithm.

The defaults of an algorithm's section are the settings of its paper, so a recipe shows only what differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
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

from mmrl.config.algorithm_settings import AlgorithmSettings
from mmrl.config.algorithms import as_settings, for_samples, samples_nothing
from mmrl.config.data import Data, without_name
from mmrl.config.dtype import with_choice
from mmrl.config.environment import Environment
from mmrl.config.midway import Midway
from mmrl.config.model import Lora, Model
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
from mmrl.config.teacher import MOST_TEACHERS, Teacher, as_list

__all__ = [
    "Lora",
    "Model",
    "Partial",
    "Rollout",
    "Sampling",
    "Sde",
    "Section",
    "TextSampling",
    "Window",
]

MOST_CONTINUED = 256
"""How often the learning rate of a run may be changed."""
Makes = Literal["text", "image", "video"]
"""The kind of a pipeline's samples."""


class Reward(Section):
    name: str
    """``shapes``, ``jpeg:compressibility``, ``path/to/my.py:name``."""
    label: str | None = None
    """Its name in metrics and reports; None takes the last part of ``name``."""
    weight: float = 1.0
    """Its factor in the weighted sum. With 0 it is measured and not trained on."""
    modality: Literal["both", "video", "audio"] = "both"
    """What it trains of a clip with sound (docs/reference/families.md). If no reward trains one of the two, log-probs
    and losses are of the other alone."""
    normalize: Literal["none", "batch", "group"] = "none"
    """Divide by the batch's standard deviation, or standardise inside each group, before weighting."""
    batch_size: Many | None = None
    """Samples of one call; None gives it all that are ready."""
    timeout: PositiveFloat = 60.0
    """Seconds for one batch."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often a call that failed is made again."""
    on_failure: Literal["fail", "drop"] = "fail"
    """Stop the run, or leave the sample out of the update (counted, named in failures.jsonl)."""
    process: bool = False
    """Compute it in a process of its own: Python that takes long does not hold up what the device is given to do. For
    rewards without a model on the device and without a gradient."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the reward."""


class Scoring(Section):
    """What a training step does if rewards fail for many of its samples (docs/rewards.md)."""

    max_failed: Fraction = 0.25
    """If a larger share of a step's samples has no score, or no sample has one, the step waits and tries again. Rewards
    of weight 0 do not count."""
    patience: Duration = 600.0
    """How long it does so (``10m``, ``90s``, or seconds); then the run stops with exit code 3 and can be resumed."""


_NO_REWARDS = ()
"""In place of ``rewards``, which every recipe must have, in one whose algorithm does not sample."""


def _none_asked(value: object, check: ValidatorFunctionWrapHandler) -> list[Reward]:
    return [] if value is _NO_REWARDS else check(value)


def _number_or_auto(value: object) -> object:
    if value != "auto" and not (isinstance(value, int) and value >= 1):  # one message in place of one per union member
        raise ValueError(f"train.steps_per_forward: expected a whole number from 1 on or 'auto', got {value!r}")
    return value


class Train(Section):
    left_to_plan = ("micro_batch_size", "micro_batch_tokens")

    steps: Count
    """Training steps: each samples, scores and updates."""
    prompts_per_step: Many
    """Different prompts of a step."""
    group_size: Many
    """Samples of each prompt, which are compared with one another."""
    micro_batch_size: Many = 8
    """Samples per micro-batch of the update; for text at most so many, with the limit of ``micro_batch_tokens``.
    ``auto``, or no value: on a GPU as many as its memory holds and as still save time, by the plan (docs/gpus.md)."""
    micro_batch_tokens: Count | None = None
    """Text: most tokens per micro-batch, padding included: its rows times its longest prompt plus response. ``auto``,
    or no value: on a GPU, where ``micro_batch_size`` is left to the plan, too, as many as its memory holds and as still
    save time; else without limit."""
    packing: bool | Literal["auto"] = "auto"
    """Text: compute whole rows behind one another in place of padding them to the longest; log-probs and gradients are
    the same to rounding. ``auto``: on CUDA, for models of the families that it is tested with (docs/text.md)."""
    steps_per_forward: Annotated[Count | Literal["auto"], BeforeValidator(_number_or_auto)] = 1
    """Pictures, policy gradients: recorded denoising steps of a micro-batch in one forward pass, whose batch and memory
    grow by the same factor. The gradient is the same. ``auto``: the plan chooses the fastest number that fits into
    memory (docs/speed.md)."""
    updates_per_step: Many = 1
    """Optimizer updates that a step's samples are divided into."""
    balance: Literal["predicted", "measured", "moving"] = "predicted"
    """Several controllers: how prompts are divided to balance the load. Text: by a cost that is estimated by a fixed
    table, or fitted to measured seconds. ``moving`` (text and pictures): as ``predicted``, and a controller without
    work begins prompts that another has not begun. With ``measured`` and ``moving`` two equal runs divide prompts
    differently, and differ in the last bits."""
    backend: Literal["replicated", "fsdp", "megatron"] = "replicated"
    """With several devices each holds all weights, gradients and optimizer state; a shard of them (FSDP2); or a part of
    every layer (Megatron-Core), where ``tensor_parallel`` devices of a controller compute a row together."""
    shard_size: Few | None = None
    """FSDP2: devices, next to one another, that divide the weights; each such group has all of them (HSDP), so that
    weights are gathered within a group, on one host, and only gradients pass between groups. None: all devices."""
    tensor_parallel: Few = 1
    """Devices of a controller that compute each layer together."""
    sequence_parallel: bool = False
    """The devices of ``tensor_parallel`` also split activations outside the parallel layers by tokens."""
    pipeline_parallel: Few = 1
    """Megatron-Core: pipeline stages, each on ``tensor_parallel`` devices of the same controller."""
    pipeline_chunks: Few = 1
    """Megatron-Core: chunks of layers per stage (interleaved schedule): devices idle less and communicate more."""
    distributed_optimizer: bool = False
    """Megatron-Core: devices with the same weights divide Adam's moments and its step (ZeRO-1, arXiv 1910.02054)."""
    context_parallel: Few = 1
    """Devices of a controller that split tokens: of each row of an update (text), or of each sample in sampling and in
    the update (pictures and clips of some families, docs/reference/sequence_parallel.md)."""
    expert_parallel: Few = 1
    """Megatron-Core, mixtures of experts: devices of a controller that divide the experts of each layer and exchange
    tokens."""

    @model_validator(mode="before")
    @classmethod
    def _chooses_one(cls, given: object) -> object:
        if isinstance(given, Mapping) and given.get("micro_batch_tokens") == "auto":
            rows = given.get("micro_batch_size", "auto")
            if rows != "auto":
                raise ValueError(
                    f"micro_batch_tokens is auto, which chooses how large a micro-batch is, and micro_batch_size is "
                    f"{rows}; remove one of the two"
                )
        return given

    @property
    def at_once(self) -> int:
        """``steps_per_forward`` as a number; ``auto`` is 1 until a plan has chosen it."""
        return 1 if self.steps_per_forward == "auto" else self.steps_per_forward

    @property
    def sharing(self) -> int:
        """Devices that hold one copy of the model together."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def width(self) -> int:
        """Devices that compute each micro-batch of an update together."""
        return self.sharing * self.context_parallel

    @property
    def divides(self) -> tuple[str, str] | None:
        """The key by which devices share a row or the weights, and its value for each to have them whole; None where
        each has."""
        if self.backend != "replicated":
            return "train.backend", "replicated"
        return ("train.context_parallel", "1") if self.width > 1 else None

    def parts(self, ranks: int) -> int:
        """Number of parts that the trained weights are split into over ``ranks`` ranks."""
        return (self.shard_size or ranks) if self.backend == "fsdp" else 1

    max_cpu_seconds: PositiveFloat | None = None
    """Stop after the step in which the CPU time of all training steps (without evaluation) exceeds this. CPU time is
    measured, so a repeated run may end after a different number of steps, and with a falling learning rate have
    different weights."""


class Earlier(Section):
    """The learning rate of a run before ``mmrl continue`` changed it."""

    until: Count
    """Updates that were done when the run was continued."""
    total: Count
    """Updates that the schedule was over."""
    peak: PositiveFloat
    """The peak of the schedule, ``optim.lr`` of then."""
    constant: NonNegative | None = None
    """The rate of every update, if it did not follow the schedule."""


class Optim(Section):
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of Adam's averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Of Adam."""
    weight_decay: NonNegative = 1e-4
    """Of AdamW."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient is scaled down to this norm."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Updates in which the rate rises to lr."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """``linear`` falls from the first update to 0 at train.steps, or to nearly 0 if train.max_cpu_seconds ends the run
    earlier; the warm-up multiplies it. ``cosine`` is that of transformers: it rises from 0 and falls after the
    warm-up."""
    min_lr_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The final learning rate of a falling schedule, as a fraction of optim.lr."""
    held: NonNegative | None = None
    """A constant learning rate in place of ``schedule``: ``mmrl continue --hold`` sets it."""
    earlier: Annotated[list[Earlier], Field(max_length=MOST_CONTINUED)] = Field(default_factory=list)
    """The learning rates of updates that were done before the run was continued with others: ``mmrl continue`` writes
    it."""
    ema_decay: Decay | None = None
    """Keep an exponential moving average of the weights, and evaluate and export it; None evaluates the weights."""
    ema_every: Count = 1
    """Updates between two updates of the average."""

    def contradictions(self) -> Iterator[str]:
        if self.min_lr_ratio and self.schedule == "constant":
            yield (
                "optim.min_lr_ratio: a constant rate never falls; set optim.schedule to cosine or linear, or remove it"
            )


class EarlyStopping(Section):
    """End training when a held-out metric stops rising. The checkpoint with its best value is always kept, in addition
    to ``checkpoint.keep``: ``--checkpoint best``."""

    metric: str
    """A metric of heldout.jsonl: ``reward/`` and the label of a reward, preferably one under ``eval.rewards``."""
    patience: Count = 3
    """Number of evaluations in a row without an improvement after which training ends."""
    threshold: NonNegative = 0.0
    """Smallest increase over the best value that counts as an improvement."""


class Guards(Section):
    """Limits on signs of over-optimisation in held-out samples (docs/reward_hacking.md). The metrics are measured at
    every evaluation, with or without limits."""

    method: Literal["limits", "sequential"] = "limits"
    """``limits`` compares each evaluation with the limits below. ``sequential`` tests over the whole run whether the
    rewards of eval.rewards fall, or lag behind the trained reward, in place of ``untrained_drop``
    (docs/reference/alarm.md)."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """``sequential``: the largest probability of a false alarm in a run, however long it is."""
    follow: Fraction = 0.75
    """``sequential``: the share of the trained reward's gain that an untrained reward keeps up with in a healthy run,
    both in standard deviations of the base model's scores. With 0 only a fall counts."""
    samples: Many | None = None
    """``sequential``: the held-out samples of the base model and of an evaluation in which eval.samples have a sign of
    over-optimisation; the test is of all of them. None: eval.samples."""
    diversity_min: Fraction | None = 0.5
    """The least diversity of a prompt's samples, as a share of the base model's."""
    distance_max: PositiveFloat | None = None
    """The largest distance to the base model: of pixels in [0, 1], or nats per token of text."""
    untrained_drop: PositiveFloat | None = 0.5
    """How far a reward of eval.rewards may fall, in standard deviations of the base model's scores."""
    action: Literal["warn", "stop"] = "warn"
    """The action after ``patience`` evaluations in a row beyond a limit."""
    patience: Count = 1
    """Evaluations in a row beyond a limit after which ``stop`` ends the run; ``warn`` names each."""


class Eval(Section):
    """Held-out prompts with fixed seeds: the curve, the grids and the before/after of the report."""

    every: Count | None = 10
    """Training steps between evaluations; None evaluates nothing."""
    samples: Many = 64
    """Held-out samples of an evaluation."""
    samples_per_prompt: Many = 1
    """Consecutive samples per prompt; ``samples`` must be a multiple of it."""
    pass_at: Annotated[list[Many], Field(max_length=MOST_REWARDS)] = Field(default_factory=list)
    """``pass@k`` for each of these k (arXiv 2107.03374): whether one of k samples of a prompt is correct, for each
    reward. A sample is correct if the reward's part ``correct`` is 1, or without such a part if its reward is at least
    1."""
    maj_at: Annotated[list[Many], Field(max_length=MOST_REWARDS)] = Field(default_factory=list)
    """Text: ``maj@k``, whether the majority answer of k samples is correct, for each reward that extracts the answer of
    a response (``answer:*``; ``answer_of`` of a class)."""
    steps: Count | None = None
    """Denoising steps of evaluation; None takes sampling.steps. Always without noise."""
    solver: Literal["euler", "dpmsolver++"] | None = None
    """What takes the steps of evaluation; None takes sampling.solver."""
    temperature: NonNegative | None = None
    """Text: temperature of evaluation; 0 is greedy, None takes sampling.temperature."""
    grid: Many = 24
    """Pictures in a sample grid."""
    rewards: Annotated[list[Reward], Field(max_length=MOST_REWARDS)] = Field(default_factory=list)
    """Measured on held-out samples and never trained on; the training rewards are always measured too."""
    tuned_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the denoising steps of evaluation that the tuned model takes; the base model takes the rest (MixGRPO's
    hybrid inference, arXiv 2507.21802), which reduces the effects of reward hacking. Needs LoRA."""
    early_stopping: EarlyStopping | None = None
    """None trains to the end."""
    since: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Evaluations up to this step do not end the run, by early stopping or by a guard: ``mmrl continue`` sets it."""
    guards: Guards = Guards()
    """Limits on signs of reward hacking, which warn or stop the run."""


class Checkpoint(Section):
    every: Count = 10
    """Training steps between checkpoints."""
    keep: Count = 2
    """Newest checkpoints to keep. With 1 the previous one stays until the newest has given a finite result."""


class WarmStart(Section):
    """A run of its own that comes first. Its recipe is this one with these sections layered over it, as files are.

    Then this run begins with its weights: with its adapter, or without ``model.lora`` with the whole model. The first
    run lies in ``OUT-warm``; where it has ended, its weights are used again.
    """

    algorithm: dict[str, Any]
    """What trains first, such as ``{type: sft}``."""
    data: dict[str, Any] | None = None
    """``name``, ``train`` and ``heldout`` of its prompts; without it those of this recipe."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Keys of ``sampling`` that differ; the window of this recipe is left out."""
    rewards: list[Any] = Field(default_factory=list)
    """None for what trains on given answers or pictures, and without this recipe's environment; ``eval.rewards`` are
    measured."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Keys of ``train`` that differ: its steps, and for SFT of pictures ``group_size: 1``."""
    optim: dict[str, Any] = Field(default_factory=dict)
    """Keys of ``optim`` that differ, such as ``lr``."""
    eval: dict[str, Any] = Field(default_factory=dict)
    """Keys of ``eval`` that differ."""
    checkpoint: dict[str, Any] = Field(default_factory=dict)
    """Keys of ``checkpoint`` that differ."""


class Recipe(Section):
    """Checks each section by itself; ``mmrl.config.checks`` finds contradictions between sections."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
    """The run's directory is ``runs/<name>`` by default."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed for all training randomness."""
    pipeline: str
    """``diffusion/sd3``, or path/to/file.py."""
    model: Model
    data: Data
    sampling: Annotated[
        Annotated[Sampling, Tag("diffusion")] | Annotated[TextSampling, Tag("text")], Discriminator(kind_of)
    ]
    rollout: Rollout = Rollout()
    rewards: Annotated[list[Reward], Field(min_length=1, max_length=MOST_REWARDS), WrapValidator(_none_asked)]
    """At least one; none for algorithms that train on pairs (dpo, reward_model), and with a ``teacher`` alone."""
    scoring: Scoring = Scoring()
    midway: Midway | None = None
    """Rewards of predicted results, or of partial responses, decide during sampling which samples are finished."""
    environment: Environment | None = None
    """What the policy acts in over several turns: tools, or a world. None: a response is one turn."""
    algorithm: Annotated[SerializeAsAny[AlgorithmSettings], BeforeValidator(as_settings)]
    """``type`` names the algorithm, a file of mmrl/algorithms or path/to/file.py:Class; other keys are its settings."""
    teacher: Annotated[list[Teacher], Field(max_length=MOST_TEACHERS), BeforeValidator(as_list)] = Field(
        default_factory=list
    )
    """One, or a list of them: their divergence from the student, on what it samples, is added to the loss."""
    warm_start: WarmStart | None = None
    """A run that comes first, such as SFT on given pictures; this one begins with its weights."""
    train: Train
    optim: Optim = Optim()
    performance: Performance = Performance()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    features: Features = Features()
    controllers: Few = 1
    """Processes that run the loop in parallel, each with its own prompts and devices."""
    devices_per_controller: Few = 1
    """Devices of one host: GPUs, or on CPUs processes with one thread each."""
    placement: Annotated[Placement, BeforeValidator(placement_settings)] = Placement()
    """``colocate``, ``partial``, ``greedy``, ``adaptive``, or a section."""
    ray: str = "local"
    """Where several controllers run, unless torchrun or Slurm starts them: ``local`` starts Ray on this machine,
    ``auto`` or an address uses a cluster."""
    env: list[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]] = Field(default_factory=list)
    """Environment variables that the run needs (``[HF_TOKEN]``), by name. Controllers on a cluster get the values from
    where the run starts. Values are written into no file."""
    runtime: Runtime = Runtime()
    device: str = "auto"
    """``auto`` takes an accelerator if there is one; ``cpu`` and ``cuda:1`` name a device."""
    threads: Few | None = 1
    """CPU threads of the process; None keeps torch's default."""
    profile: bool = False
    """Write a trace of the second and third step of a process, by torch's profiler, into the run's folder."""
    log: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Trackers in addition to metrics.jsonl; each needs the extra of its name."""
    architecture: str | None = None
    """A JSON file with the checkpoint's component configurations, for ``plan`` when the checkpoint is not available."""

    @property
    def makes(self) -> Makes:
        """The kind of the pipeline's samples, by the section ``sampling``."""
        if isinstance(self.sampling, TextSampling):
            return "text"
        return "image" if self.sampling.frames is None else "video"

    @property
    def shows(self) -> Makes:
        """What rewards, reports and people see of a sample: pictures, too, where the policy writes one as tokens."""
        written = isinstance(self.sampling, TextSampling) and self.sampling.picture is not None
        return "image" if written else self.makes

    @property
    def overlong(self) -> Literal["skip", "cut", "error"]:
        """What happens to prompts with too many tokens: ``data.overlong``, or the default of what is sampled."""
        return self.data.overlong or ("skip" if self.sampling.type == "text" else "cut")

    @property
    def response_tokens(self) -> int:
        """Text: the most tokens behind a prompt, those that an environment tells among them."""
        return self.decoding.max_new_tokens if self.environment is None else self.environment.max_tokens

    @property
    def written_tokens(self) -> int:
        """Text: the most tokens behind a prompt that the policy writes; an environment tells the others."""
        turns = 1 if self.environment is None else self.environment.max_turns
        return min(self.response_tokens, turns * self.decoding.max_new_tokens)

    @property
    def begun_per_prompt(self) -> int:
        """Samples of a prompt that are begun; train.group_size of them are finished."""
        return self.train.group_size if self.midway is None else self.midway.group_size

    @property
    def sampled_at_once(self) -> int:
        """The rows of a micro-batch of sampling."""
        return self.sampling.batch_size or self.train.micro_batch_size

    @property
    def replays_first(self) -> bool:
        """Whether old log-probs are recomputed with a gradient: compiled code rounds half precision differently without
        one, as in sampling."""
        half = self.performance.compile and self.model.dtype != "float32" and self.sampling.type != "text"
        return half and self.algorithm.kind == "policy_gradient"

    @property
    def denoising(self) -> Sampling:
        """The sampling section of a diffusion recipe. Raises ``TypeError`` for a text recipe."""
        if not isinstance(self.sampling, Sampling):
            raise TypeError(f"{self.name} samples text")
        return self.sampling

    @property
    def decoding(self) -> TextSampling:
        """The sampling section of a text recipe. Raises ``TypeError`` for a diffusion recipe."""
        if not isinstance(self.sampling, TextSampling):
            raise TypeError(f"{self.name} samples pictures")
        return self.sampling

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, values: object) -> object:
        """The sections with what follows from one another: the dtype, the algorithm's own name, and its rewards."""
        if not isinstance(values, Mapping):
            return values
        made = dict(with_choice(without_name(values)))
        algorithm = made.get("algorithm")
        if isinstance(algorithm, Mapping) and "type" in algorithm:
            made["algorithm"] = {**algorithm, "type": for_samples(algorithm["type"], made.get("sampling"))}
        if made.get("rewards") not in (None, []):
            return made
        if made.get("teacher") or samples_nothing(made.get("algorithm")):
            made["rewards"] = _NO_REWARDS
        elif made.get("environment"):
            made["rewards"] = [{"name": "environment"}]
        return made
