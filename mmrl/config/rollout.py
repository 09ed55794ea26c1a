"""The section ``rollout`` of a recipe: the engine that samples text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat

from mmrl.config.section import Count, Many, OwnClass, Section


class Partial(Section):
    """Cut long responses and go on with them in the next step, under the weights of then (partial rollout)."""

    cut_after: Count
    """Tokens drawn for a response at a time."""
    extra: Many
    """Groups in flight beyond train.prompts_per_step: the step trains on the first that are whole."""
    pools: Many = 1
    """Parts that a step's slots and ``extra`` are divided into; each has a flight of its own, on one controller. What
    is trained on depends on their number and not on that of controllers, which must divide it."""


class Rollout(Section):
    """What samples text: the training process itself, or an engine with weights of its own."""

    engine: Literal["transformers", "vllm", "vllm_server", "sglang"] | OwnClass = "transformers"
    """One of ours, or a class in a file of your own: ``path/to/file.py:Class``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the engine."""
    importance: Literal["auto", "token", "sequence", "none"] = "auto"
    """Truncated importance sampling against the gap between engine and trainer; ``auto`` is ``token`` for an engine
    with weights of its own, and ``none`` in process."""
    importance_cap: PositiveFloat = 2.0
    update_bucket_mib: Count = 512
    """MiB of weights that are gathered before they go on to an engine with weights of its own: a tensor that is larger
    goes alone."""
    partial: Partial | None = None
    """None waits for the longest response of every step."""

    @property
    def own_class(self) -> bool:
        """Whether the engine is a class in a file of the user's."""
        return ".py:" in self.engine

    @property
    def engine_name(self) -> str:
        """What messages call the engine: of a file only its name."""
        return Path(self.engine).name
