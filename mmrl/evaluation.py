"""Held-out measurement: fixed prompts and fixed noise, no exploration noise, rewards that training may not see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mmrl.batch import Run, chunks
from mmrl.report.grids import write_samples
from mmrl.report.metrics import MetricsLog
from mmrl.report.progress import Progress
from mmrl.report.rundir import RunDir
from mmrl.report.texts import write_texts
from mmrl.rewards.scoring import Failure, RewardSet
from mmrl.trajectory import Prompt, Sample, SampleId, Slot

SEED = 20_261_121
"""Of all held-out noise, whatever the run's seed: runs are compared on the same pictures-to-be."""


@dataclass
class Made:
    """What an evaluation made: one entry per sample, scores by ``label`` and ``label/part``."""

    samples: list[Sample] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)


class Heldout:
    """The held-out prompts of a run with the rewards measured on them."""

    def __init__(self, run: Run, prompts: Sequence[Prompt], root: Path) -> None:
        self.run, self.prompts = run, prompts
        self.rewards = [run.rewards, RewardSet(run.recipe.eval.rewards, root, run.rewards.device)]

    def score(self, samples: int) -> tuple[dict[str, float], Made, list[Failure]]:
        """Means over ``samples`` samples, what was made, and what could not be scored.

        Sample ``i`` is of prompt ``i mod n``, always from the same noise.
        """
        slots = [Slot(-1, i, 0, self.prompts[i % len(self.prompts)]) for i in range(samples)]
        made = self._make(slots)
        n = len(self.prompts)
        groups = [list(range(p, samples, n)) for p in range(min(n, samples))]
        with torch.no_grad():
            scores = [rewards.score(made, groups, step=-1) for rewards in self.rewards]
        parts = {name: values for s in scores for name, values in s.parts.items()}
        failures = [f for s in scores for f in s.failures]
        rows = [{k: v[i].item() for k, v in parts.items() if math.isfinite(v[i])} for i in range(samples)]
        row = {f"reward/{name}": finite_mean(value) for name, value in parts.items()}
        row |= {"samples": samples, "dropped": len({f.sample.slot for f in failures})}
        return row, Made(made, rows), failures

    def _make(self, slots: list[Slot]) -> list[Sample]:
        """Sample as the recipe's evaluation says, under its weights."""
        run, recipe = self.run, self.run.recipe
        inputs = self.rewards[0].inputs | self.rewards[1].inputs
        inputs |= frozenset({"image"}) if run.pipeline.makes == "image" else frozenset()
        made: list[Sample] = []
        with run.policy.for_evaluation(), torch.no_grad(), Progress(len(slots), "evaluate", "samples") as progress:
            run.pipeline.sync(run.policy.tag)
            for chunk in chunks(slots, recipe.sampling.batch_size or recipe.train.micro_batch_size):
                keys = run.pipeline.encode(chunk)
                ids = [SampleId(-1, s.index, 0, 0) for s in chunk]
                trajectory = run.pipeline.sample(chunk, ids, [], SEED, evaluate=True)
                made += run.pipeline.samples(trajectory, inputs)
                run.pipeline.features.release(keys)
                progress.advance(len(chunk))
        return made


def finite_mean(values: Tensor) -> float:
    return values[values.isfinite()].mean().item()


def measure(
    run: Run, heldout: Heldout, samples: int, directory: RunDir, step: int, log: MetricsLog
) -> dict[str, float]:
    """Evaluate after ``step`` steps: a row of heldout.jsonl and samples to look at. Returns the row."""
    row, made, failures = heldout.score(samples)
    for f in failures:
        directory.failure(step, "heldout", f.prompt, f.reason, reward=f.reward, sample=vars(f.sample))
    log.write(step, row)
    shown, scores = made.samples[: run.recipe.eval.grid], made.scores[: run.recipe.eval.grid]
    if run.pipeline.makes == "image":
        images = [s.image for s in shown if s.image is not None]
        log.picture(step, "samples", write_samples(directory, step, images, [s.prompt.text for s in shown], scores))
    else:
        write_texts(directory, step, shown, scores)
    return row
