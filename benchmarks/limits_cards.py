"""A check of ``gpu_limits.py`` on what a small card must hold: the peak with a layer of ``examples/cards``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from slices import JPEG, closed, sampled
from smoke_models import peak_gib
from smoke_place import Place, SkippedError
from true_shapes import built

from mmrl.config.loader import load_recipe
from mmrl.planner.plan import plan

CARD = Path(__file__).resolve().parents[1] / "examples" / "cards" / "12gb.yaml"
SLICE = ["train.prompts_per_step=1", "train.group_size=2", "train.updates_per_step=1", "sampling.steps=5", JPEG]
SMALL = ["sampling.height=64", "sampling.width=64", "sampling.max_sequence_length=32"]
PEAK = {"peak over plan": (0.95, 1.05)}
"""The aim, in the place of a prediction."""


def twelve_gib(place: Place) -> dict[str, Any]:
    """Z-Image with the layer for a card of 12 GB: the peak of sampling, decoding and a slice of the update, and that
    over the plan's. The text encoder has one layer here, so the peak of encoding is left out on both sides."""
    if not find_spec("bitsandbytes"):
        raise SkippedError("bitsandbytes is not installed, which has nf4")
    words = [*SLICE, *(SMALL if place.small else ())]
    context = built(place, "z-image", *words, layer=CARD)
    if place.gpu:
        torch.cuda.reset_peak_memory_stats()
    slices = sampled(context)
    slices.backward()
    context.policy.apply()
    figures: dict[str, Any] = {"peak GiB": None, "peak over plan": None}
    if place.gpu and not place.small:
        made = plan(load_recipe(["z-image", CARD], [f"device={place.device}", *words]))
        most = max(phase.total for phase in made.phases if phase.name != "encode")
        figures = {"peak GiB": round(peak_gib(), 2), "peak over plan": round(peak_gib() * 2**30 / most, 3)}
    closed(context)
    return figures
