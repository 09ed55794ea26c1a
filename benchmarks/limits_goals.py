"""Checks of ``gpu_limits.py`` that say which share of the GPU's limit a run reaches, and how near its memory is to the
plan's. Operations are counted by torch as they run; the ceiling is a bfloat16 product in the same process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from limits_device import bandwidth, ceiling
from limits_pictures import run
from limits_text import TOKENS, uneven
from slices import batch_of, closed, sampled
from smoke_models import peak_gib, timed
from smoke_place import Place
from torch.utils.flop_counter import FlopCounterMode
from true_shapes import decoder, run_of_text

from mmrl.config.loader import load_recipe
from mmrl.planner.plan import plan
from mmrl.step.batch import samples_of
from mmrl.step.step_context import StepContext

WIDTH_1_5B = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
WIDTH_1_5B |= {"num_attention_heads": 12, "num_key_value_heads": 2}
"""Those of Qwen2.5-1.5B."""
PICTURES = {"update, compiled, share": (0.45, 0.45), "sampling, compiled, share": (0.5, 0.5)}
PICTURES["peak over plan"] = (0.95, 1.05)
TEXT = {"update, share": (0.4, 0.4), "decoding, share of bandwidth": (0.45, 0.45), "busy rows": (0.9, 0.97)}
"""The goals, in the place of predictions."""


def share(place: Place, work: Callable[[], Any], repeats: int = 3) -> tuple[float, float]:
    """Of the ceiling, and the milliseconds of ``work``."""
    with FlopCounterMode(display=False) as counted:
        work()
    seconds = timed(place, work, 1 if place.small else repeats)
    reached = counted.get_total_flops() / seconds / 1e12 / ceiling(place)
    return round(reached, 3), round(1000 * seconds, 1)


def pictures(place: Place) -> dict[str, Any]:
    """SD3.5-M as the plan has it on an H100: a slice of the update, and sampling of a micro-batch, by the operations of
    eager blocks and the seconds of compiled ones; the peak over the plan's."""
    words, figures = ["model.gradient_checkpointing=false"], dict[str, Any]()
    for way in ("eager", "compiled") if place.gpu and not place.small and find_spec("triton") else ("eager",):
        context = run(place, *words, f"performance.compile={str(way == 'compiled').lower()}")
        if place.gpu:
            torch.cuda.reset_peak_memory_stats()
        slices = sampled(context)
        slots = context.controller.slots(0, context.prompts, 1, context.rollout.cost)
        every = samples_of(slots, context.recipe.train.micro_batch_size)
        asked = [slot for slot, _ in every], [name for _, name in every]
        context.pipeline.encode(slots)

        def draw(context: StepContext = context, asked: Any = asked) -> None:
            with torch.no_grad():
                context.pipeline.sample(asked[0], asked[1], (), 0)

        for label, work in (("update", slices.backward), ("sampling", draw)):
            reached, milliseconds = share(place, work)
            figures[f"{label}, {way}, share"] = reached
            figures[f"{label}, {way}, ms"] = milliseconds
            place.keep(figures)
        if way == "eager":
            figures |= beside_plan(place, context)
        closed(context)
        del context, slices, draw
    return figures


def beside_plan(place: Place, context: StepContext) -> dict[str, Any]:
    """The peak of memory so far over that of the plan of the same recipe."""
    if not place.gpu or place.small:
        return {"peak over plan": None}
    made = plan(replace(load_recipe(["sd35-medium"], []), recipe=context.recipe))
    return {"peak over plan": None if made.peak is None else round(peak_gib() * 2**30 / made.peak.total, 3)}


def text(place: Place) -> dict[str, Any]:
    """A decoder of 1.5B, all weights: the update's share of the ceiling; decoding's of what reading the weights for
    each token takes; the rows that are busy where lengths are uneven."""
    folder, rows = decoder(place, changes=WIDTH_1_5B), 8 if place.small else 64
    figures: dict[str, Any] = updated(place, folder)
    place.keep(figures)
    figures |= decoded(place, folder, rows, 8 if place.small else 128)
    place.keep(figures)
    context = run_of_text(place, folder, *uneven(place), f"sampling.batch_size={rows}", "performance.compile=true")
    batch_of(context)
    slots: Any = context.pipeline._slots  # type: ignore[attr-defined]
    figures["busy rows"] = round(slots.busy / slots.places, 3)
    closed(context)
    return figures


def updated(place: Place, folder: Path) -> dict[str, Any]:
    step = ["train.prompts_per_step=8", "train.group_size=8", "sampling.max_new_tokens=128"]
    if place.small:
        step = ["train.prompts_per_step=2", "train.group_size=2", "sampling.max_new_tokens=8"]
    context = run_of_text(place, folder, *step, f"train.micro_batch_tokens={TOKENS}")
    slices = sampled(context)
    largest = max(range(len(slices.micro_batches)), key=lambda n: slices.micro_batches[n].padded)
    reached, milliseconds = share(place, lambda: slices.backward(largest))
    closed(context)
    return {"update, share": reached, "update, ms": milliseconds}


def decoded(place: Place, folder: Path, rows: int, length: int) -> dict[str, Any]:
    """Of ``rows`` responses of ``length`` tokens."""
    words = [f"sampling.max_new_tokens={length}", f"sampling.min_new_tokens={length}", f"sampling.batch_size={rows}"]
    context = run_of_text(place, folder, *words, "performance.compile=true")
    prompts = context.controller.slots(0, context.prompts, rows // 4, context.rollout.cost)
    context.pipeline.encode(prompts)
    every = samples_of(prompts, 4)
    asked = [slot for slot, _ in every], [name for _, name in every]
    seconds = timed(place, lambda: context.pipeline.sample(asked[0], asked[1], (), 0), 1)
    weights = sum(p.numel() for p in context.policy.module.parameters()) * 2
    closed(context)
    return {
        "decoding, tokens/s": round(rows * length / seconds),
        "decoding, share of bandwidth": round(weights * length / seconds / 1e12 / bandwidth(place), 4),
    }
