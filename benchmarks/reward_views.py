"""The cost of copying the samples for every reward.

    python benchmarks/reward_views.py                      # kinds of samples, and two steps of shapes-lora
    python benchmarks/reward_views.py sums train.prompts_per_step=4

It prints seconds per sample by kind, and the share of a real step.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch
from PIL import Image

import mmrl
from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards import calling, views
from mmrl.training.loop import train_step

STEPS = 2


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.zeros((height, width, 3), np.uint8))


def kinds() -> dict[str, Sample]:
    """Samples as pipelines make them, with the meta of a real prompt."""
    prompt: Prompt = mmrl.load("datasets", "shapes:prompts")("train")[0]
    place = SampleId(0, 0, 0, 0)
    return {
        "text": Sample(prompt, place, text="x" * 4096),
        "picture 32 x 32": Sample(prompt, place, image=picture(32, 32)),
        "picture 512 x 512": Sample(prompt, place, image=picture(512, 512)),
        "picture 1024 x 1024": Sample(prompt, place, image=picture(1024, 1024)),
        "tensor 512 x 512": Sample(prompt, place, tensor=torch.zeros(3, 512, 512)),
        "clip 33 x 832 x 480": Sample(prompt, place, video=tuple(picture(832, 480) for _ in range(33))),
    }


def seconds_of(sample: Sample) -> float:
    """Of one copy: the least of several times."""
    found = []
    for _ in range(5):
        began, n = time.perf_counter(), 0
        while time.perf_counter() - began < 0.05:
            views.views([sample])
            n += 1
        found.append((time.perf_counter() - began) / n)
    return min(found)


def step_of(recipe: str, overrides: list[str]) -> tuple[float, float]:
    """Processor seconds of the copies in the steps of a recipe, and of the steps."""
    spent = 0.0

    def timed(samples: Any) -> list[Sample]:
        nonlocal spent
        began = time.thread_time()
        made = views.views(samples)
        spent += time.thread_time() - began
        return made

    calling.views = timed  # type: ignore[assignment]
    loaded = load_recipe([recipe], overrides)
    run = build(loaded.recipe)
    train_step(run, 0, Clock(torch.device("cpu")))  # warm
    spent, began = 0.0, time.process_time()
    for step in range(1, 1 + STEPS):
        train_step(run, step, Clock(torch.device("cpu")))
    return spent, time.process_time() - began


def main() -> None:
    for name, sample in kinds().items():
        print(f"{name:22} {1e6 * seconds_of(sample):10.1f} microseconds a sample and reward")
    recipe, *overrides = sys.argv[1:] or ["shapes-lora", "train.prompts_per_step=2"]
    spent, whole = step_of(recipe, overrides)
    print(f"{recipe}: {1e3 * spent:.2f} ms of {whole:.2f} CPU-seconds of {STEPS} steps, {spent / whole:.3%}")


if __name__ == "__main__":
    main()
