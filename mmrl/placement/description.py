"""What a pipeline says of itself before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from mmrl.pipelines.protocol import Pipeline

Phase = Literal["encode", "sample", "decode", "train", "optimizer"]
"""The parts of a step, in order. A pathwise objective samples and decodes inside ``train``."""


@dataclass(frozen=True)
class Component:
    """A module of the pipeline, its parameters on the meta device in the dtypes they will have.

    ``needed`` are the phases in which it must be on the device; a recipe that offloads has it there in no other.
    """

    role: str
    name: str
    module: nn.Module
    needed: frozenset[Phase]


@dataclass(frozen=True)
class Description:
    """What ``describe(recipe, path, architecture)`` of a pipeline's module returns.

    ``pipeline`` is the pipeline itself, as ``build`` makes it (the adapters of LoRA too) but on the meta device;
    ``source`` says where the sizes come from.
    """

    pipeline: Pipeline
    components: list[Component]
    source: str
