"""FLUX.2-klein as an editor (``Flux2KleinPipeline`` with ``image``): a picture and an edit instruction."""

from __future__ import annotations

from functools import partial

import torch

from mmrl.config.schema import Recipe

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


describe = partial(loading.describe, Flux2KleinEditAdapter)
