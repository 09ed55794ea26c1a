"""FLUX.2 dev as an editor (``Flux2Pipeline`` with ``image``): an edit instruction and one picture or several."""

from __future__ import annotations

from functools import partial

import torch

from mmrl.config.schema import Recipe

from . import loading
from .flow import FlowPipeline
from .flux2 import Flux2Adapter


class Flux2EditAdapter(Flux2Adapter):
    """Final class. Every prompt carries ``sampling.pictures`` pictures, which are brought to the size that is
    sampled."""

    family = "FLUX.2 (editing)"
    edits = True
    several = True


def build(recipe: Recipe, path: str, device: torch.device) -> FlowPipeline:
    """See ``loading.build``."""
    return loading.build(Flux2EditAdapter, recipe, path, device)


describe = partial(loading.describe, Flux2EditAdapter)
