"""Describe a pipeline before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

from mmrl.core.trajectory import Prompt
from mmrl.models.protocol import Pipeline

Phase = Literal["encode", "sample", "decode", "train", "optimizer"]
"""The parts of a step, in order. A pathwise objective samples and decodes inside ``train``."""


class Resting(NamedTuple):
    """Weights that wait in the host's memory with ``model.offload`` while another of several models computes."""

    freed: int
    """Bytes that are not on the device."""
    kept: int
    """Bytes in the host's memory, of all models."""
    phases: frozenset[Phase]
    """Where one computes at a time."""


@dataclass(frozen=True)
class Component:
    """A module of the pipeline, its parameters on the meta device in the dtypes they will have.

    ``needed`` are the phases in which it must be on the device; a recipe that offloads has it there in no other.
    ``resting``: what of it is not there even then.
    """

    role: str
    name: str
    module: nn.Module
    needed: frozenset[Phase]
    resting: Resting | None = None


@dataclass(frozen=True)
class Beside:
    """What is on the device beside the pipeline in every phase: an engine with weights of its own, or a model that
    draws what the policy writes.

    ``bytes``, or a ``share`` (0 to 1) of the device's memory; both 0 where it is elsewhere, or its size is not known.
    ``kept``: bytes of it that wait in the host's memory while it sleeps; the rest is freed.
    """

    role: str
    what: str
    bytes: int = 0
    share: float = 0.0
    kept: int = 0


class Longest(NamedTuple):
    """The prompt that takes most of those looked at, the ``tokens`` of a row with it (prompt and response), and what is
    to be said of the others."""

    prompt: Prompt
    tokens: int
    notes: Sequence[str] = ()
    seconds: float = 0.0
    """In which this machine's processor encodes a prompt: the median of those looked at."""


@dataclass(frozen=True)
class Description:
    """What ``describe(recipe, path, architecture)`` of a pipeline's module returns.

    ``pipeline`` is the pipeline itself, as ``build`` makes it (the adapters of LoRA too) but on the meta device;
    ``source`` says where the sizes come from. ``longest``, of a pipeline whose samples are of many lengths: given some
    prompts, the one that takes most; raises ``UserError`` where none can be used. ``pictures``: how many every prompt
    carries. ``too_long``: given prompts, notes on those that are longer than the text encoders read; raises
    ``UserError`` where that may not be (``data.overlong``). ``cache_numbers``: how many numbers a row of so many
    tokens leaves in its caches. ``by_rows``: where the model is sharded, a rank reads only its part of the checkpoint.
    ``notes``: what else a plan says of it.
    """

    pipeline: Pipeline
    components: list[Component]
    source: str
    longest: Callable[[Sequence[Prompt]], Longest] | None = None
    beside: Sequence[Beside] = ()
    pictures: int = 0
    cache_numbers: Callable[[float], float] = lambda _: 0.0
    by_rows: bool = False
    too_long: Callable[[Sequence[Prompt]], Sequence[str]] | None = None
    notes: Sequence[str] = ()
