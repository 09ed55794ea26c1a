"""FLUX.2-klein as an editor (``Flux2KleinPipeline`` with ``image``): a picture and an edit instruction."""

from __future__ import annotations

from pathlib import Path

import torch

from mmrl.config.schema import Recipe
from mmrl.pipelines.description import Description

from . import loading
from .flow import FlowPipeline
from .flux2_klein import Flux2KleinAdapter


class Flux2KleinEditAdapter(Flux2KleinAdapter):
    """Final class. Every prompt carries one picture, which is brought to the size that is sampled."""

    family = "FLUX.2-klein (editing)"
    edits = True


def build(recipe: Recipe, path: str, device: torch.device) -> FlowPipeline:
    """See ``loading.build``."""
    return loading.build(Flux2KleinEditAdapter, recipe, path, device)


def describe(recipe: Recipe, path: str, architecture: Path | None) -> Description:
    """See ``loading.describe``."""
    return loading.describe(Flux2KleinEditAdapter, recipe, path, architecture)
