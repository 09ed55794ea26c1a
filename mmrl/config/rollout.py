"""The section ``rollout`` of a recipe: the engine that samples text, or pictures of two families."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, model_validator

from mmrl.config.section import Count, Many, NonNegative, Options, OwnClass, Section


class Partial(Section):
    """Cut long responses and continue them in the next step with the new weights (partial rollout)."""

    cut_after: Count
    """Tokens to sample for a response before it is cut."""
    extra: Many
    """Groups to sample beyond train.prompts_per_step: the step trains on the first that are complete."""
    pools: Many = 1
    """Number of pools that a step's slots and ``extra`` are divided into; each pool samples separately, on one
    controller. The training data depends on the number of pools, not on that of controllers, which must divide it."""


Statistic = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip
"""A statistic per token, or its sum, mean or maximum over a response, by verl's names: ``k1`` is the ratio of the
engine's probability to the trainer's (``seq_mean_k1``: its geometric mean), ``k2`` and ``k3`` are estimates of their
divergence."""


class Rejection(Section):
    """Leave out tokens or responses on which engine and trainer differ too much (verl's rollout_rs)."""

    statistic: Statistic
    """What is compared with the bounds."""
    high: PositiveFloat
    """A token, or a response, above it is left out."""
    low: PositiveFloat | None = None
    """A token, or a response, below it is left out; only for ``k1``, where None means ``1 / high``, as in verl."""

    @model_validator(mode="after")
    def _low_is_of_ratios(self) -> Rejection:
        if self.low is not None and not self.statistic.endswith("k1"):
            raise ValueError(f"low: {self.statistic} is never negative and has no lower bound; remove it")
        if self.low is not None and self.low >= self.high:
            raise ValueError(f"low: {self.low:g} is not below high, {self.high:g}; lower it")
        return self


GROUPED = ("gloo", "ipc", "nccl")
"""The values of ``rollout.weight_transport`` that need no file: processes that form a group."""


class Rollout(Section):
    """What samples: the training process, or an engine that holds its own copy of the weights. Pictures: ``sglang``
    with Z-Image and Qwen-Image."""

    engine: Literal["transformers", "vllm", "vllm_server", "sglang"] | OwnClass = "transformers"
    """A built-in engine, or a class in your file: ``path/to/file.py:Class``."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the engine."""
    sampling: Options = Field(default_factory=dict)
    """More sampling parameters, by the engine's names: fields of vLLM's or SGLang's SamplingParams."""
    reproducible: bool = True
    """Whether a sample depends on its own seed and on nothing else. False is faster: vLLM draws all samples with one
    generator, and SGLang starts without deterministic inference. Then a run that is resumed draws other samples, other
    controllers draw other samples, and ``mmrl verify`` cannot repeat a step. The training process always has seeds."""
    importance: Literal["auto", "token", "sequence", "none"] = "auto"
    """Truncated importance sampling against the mismatch of engine and trainer; ``auto`` is ``token`` for an engine
    with its own copy of the weights, and ``none`` for transformers in process."""
    importance_cap: PositiveFloat = 2.0
    """Upper limit of an importance weight."""
    importance_floor: NonNegative = 0.0
    """Lower limit of an importance weight."""
    importance_mode: Literal["truncate", "mask"] = "truncate"
    """A weight beyond its limits is set to the limit, or (``mask``) to 0, which leaves the token or the response out.
    TRL's default is ``importance: sequence`` with ``importance_mode: mask`` and ``importance_cap: 3``."""
    importance_normalize: Literal["none", "batch"] = "none"
    """``batch`` divides weights, after their limits, by their mean over the step's tokens (``sequence``: responses) of
    all controllers (verl's rollout_is_batch_normalize). Log-probs are then recomputed before the update, in one more
    pass without a gradient; with several updates a step they are anyway."""
    rejection: list[Rejection] = Field(default_factory=list)
    """Tests that a token must all pass, besides the limits of its weight."""
    update_bucket_mib: Count = 512
    """MiB of weights in a file for an engine in other processes; a larger tensor has its own file."""
    weight_transport: Literal["auto", "shm", "files", "gloo", "ipc", "nccl"] = "auto"
    """How weights reach a server: ``shm`` as files in the host's memory (/dev/shm), ``files`` on the disk that TMPDIR
    names; ``auto`` takes memory where it has room for all weights in float32. To vLLM's server whole weights also go
    without a file: ``gloo`` over the loopback, ``ipc`` by handles of the GPU's memory where trainer and engine share a
    GPU, ``nccl`` where the engine has other GPUs than the trainer. ``auto`` takes the last two where they are possible
    and a trial of them works, else files. ``ipc`` has not run with vLLM, and ``nccl`` not at all."""
    max_gap: PositiveFloat | None = 0.1
    """Where the training process samples: a run stops if log-probs of sampling and training are further apart than this
    with the same weights (a token's in float32, their mean in half precision). Then the model's forward with a cache
    disagrees with the one without. Of pictures that SGLang samples: the log-probs of every step, and the velocity of
    the first sample after each update, relative to its size. null trains all the same."""
    partial: Partial | None = None
    """None waits for the longest response of every step."""

    @model_validator(mode="after")
    def _floor_is_below_cap(self) -> Rollout:
        if self.importance_floor >= self.importance_cap:
            raise ValueError(
                f"importance_floor: {self.importance_floor:g} is not below importance_cap, {self.importance_cap:g}; "
                "lower it"
            )
        return self

    @model_validator(mode="after")
    def _weights_to_normalize(self) -> Rollout:
        if self.importance_normalize == "batch" and self.importance == "none":
            raise ValueError("importance_normalize: importance is none, so there are no weights; remove one of the two")
        return self

    @property
    def in_process(self) -> bool:
        """Whether the training process samples with the weights that it trains; else an engine has its own copy."""
        return self.engine == "transformers"

    @property
    def own_class(self) -> bool:
        """Whether the engine is a class in a user's file."""
        return ".py:" in self.engine

    @property
    def engine_name(self) -> str:
        """The engine's name for messages; for a file its name without the folder."""
        return Path(self.engine).name

    def contradictions(self) -> Iterator[str]:
        if not self.reproducible and (self.own_class or self.in_process):
            yield (
                "rollout.reproducible: false is for vLLM and SGLang; remove it, or set rollout.engine to vllm, "
                "vllm_server or sglang"
            )
        key = f"rollout.weight_transport: {self.weight_transport}"
        if self.weight_transport not in GROUPED:
            return
        elsewhere = "CUDA_VISIBLE_DEVICES" in (self.options.get("environment") or {})
        if self.engine != "vllm_server":
            edit = "set rollout.engine to vllm_server, or weight_transport to auto"
            yield f"{key} needs an engine in vLLM's server; {edit}"
        elif self.options.get("data_parallel_size", 1) != 1:
            yield f"{key} counts the processes of one model; remove data_parallel_size, or set weight_transport to auto"
        elif self.weight_transport == "nccl" and not elsewhere:
            yield (
                f"{key} does not work between processes on the same GPU, and the engine starts on the trainer's; set "
                "weight_transport to ipc, or give the engine other GPUs (options.environment.CUDA_VISIBLE_DEVICES)"
            )
        elif self.weight_transport == "ipc" and elsewhere:
            yield (
                f"{key} opens memory of the trainer's GPU, which the engine does not see; set weight_transport to "
                "nccl, or remove CUDA_VISIBLE_DEVICES of options.environment"
            )
