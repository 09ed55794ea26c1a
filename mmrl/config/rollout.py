"""The section ``rollout`` of a recipe: the engine that samples text."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, model_validator

from mmrl.config.section import Count, Many, NonNegative, Options, OwnClass, Section


class Partial(Section):
    """Cut long responses and go on with them in the next step, under the weights of then (partial rollout)."""

    cut_after: Count
    """Tokens drawn for a response at a time."""
    extra: Many
    """Groups in flight beyond train.prompts_per_step: the step trains on the first that are whole."""
    pools: Many = 1
    """Parts that a step's slots and ``extra`` are divided into; each has a flight of its own, on one controller. What
    is trained on depends on their number and not on that of controllers, which must divide it."""


Statistic = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip
"""Of a token, or the sum, mean or maximum over a response, by verl's names: ``k1`` is the ratio of the engine's
probability to the trainer's (``seq_mean_k1``: its geometric mean), ``k2`` and ``k3`` are estimates of their
divergence."""


class Rejection(Section):
    """Leave out tokens or responses of which engine and trainer differ too much (verl's rollout_rs)."""

    statistic: Statistic
    high: PositiveFloat
    """Above it a token, or a response, is left out."""
    low: PositiveFloat | None = None
    """Below it too; of ``k1`` only. None takes ``1 / high`` for ``k1``, as verl does."""

    @model_validator(mode="after")
    def _low_is_of_ratios(self) -> Rejection:
        if self.low is not None and not self.statistic.endswith("k1"):
            raise ValueError(f"low: {self.statistic} is never negative and has no lower bound; remove it")
        if self.low is not None and self.low >= self.high:
            raise ValueError(f"low: {self.low:g} is not below high, {self.high:g}; lower it")
        return self


class Rollout(Section):
    """What samples text: the training process itself, or an engine with weights of its own."""

    engine: Literal["transformers", "vllm", "vllm_server", "sglang"] | OwnClass = "transformers"
    """One of ours, or a class in a file of your own: ``path/to/file.py:Class``."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the engine."""
    sampling: Options = Field(default_factory=dict)
    """Further sampling parameters by the engine's names: fields of vLLM's or SGLang's SamplingParams."""
    importance: Literal["auto", "token", "sequence", "none"] = "auto"
    """Truncated importance sampling against the gap between engine and trainer; ``auto`` is ``token`` for an engine
    with weights of its own, and ``none`` in process."""
    importance_cap: PositiveFloat = 2.0
    """Upper limit of an importance weight."""
    importance_floor: NonNegative = 0.0
    """Lower limit of an importance weight."""
    importance_mode: Literal["truncate", "mask"] = "truncate"
    """What becomes of a weight beyond its limits: it is set to the limit, or to 0, which leaves the token or the
    response out. TRL's default is ``importance: sequence`` with ``importance_mode: mask`` and ``importance_cap: 3``."""
    importance_normalize: Literal["none", "batch"] = "none"
    """``batch`` divides weights, after their limits, by their mean over the step's tokens (``sequence``: responses) of
    all controllers (verl's rollout_is_batch_normalize). Log-probs are then recomputed before the update, in one more
    pass without a gradient; with several updates a step they are anyway."""
    rejection: list[Rejection] = Field(default_factory=list)
    """Further tests that a token must pass, all of them, whatever its weight."""
    update_bucket_mib: Count = 512
    """MiB of weights that are gathered before they go on to an engine with weights of its own: a tensor that is larger
    goes alone."""
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
    def own_class(self) -> bool:
        """Whether the engine is a class in a file of the user's."""
        return ".py:" in self.engine

    @property
    def engine_name(self) -> str:
        """What messages call the engine: of a file only its name."""
        return Path(self.engine).name
