"""How often a step does what: exact counts, from the recipe alone."""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.config.schema import Recipe


@dataclass(frozen=True)
class Counts:
    """Of one step. ``batch`` and ``slice_rows`` are the largest micro-batch of sampling and slice of training; a
    pathwise objective samples inside its slices and has no micro-batches of its own."""

    prompts: int
    samples: int
    batch: int
    micro_batches: int
    sampling_forwards: int
    entries: int
    slices: int
    slice_rows: int
    optimizer_steps: int


def count(recipe: Recipe, entries: int, pathwise: bool) -> Counts:
    """As ``mmrl.loop`` cuts; ``entries``: how many actions or noise levels of a sample an update goes through."""
    train = recipe.train
    samples = train.prompts_per_step * train.group_size
    batch = samples if pathwise else recipe.sampling.batch_size or train.micro_batch_size
    chunks = [range(start, min(start + batch, samples)) for start in range(0, samples, batch)]
    turns = [
        sum(k % train.updates_per_step == u for k in range(train.group_size)) for u in range(train.updates_per_step)
    ]
    rows = [samples] if pathwise else [n * train.prompts_per_step for n in turns]
    return Counts(
        prompts=train.prompts_per_step,
        samples=samples,
        batch=min(batch, samples),
        micro_batches=0 if pathwise else len(chunks),
        sampling_forwards=0 if pathwise else len(chunks) * recipe.denoising.steps,
        entries=entries,
        slices=sum(-(-n // train.micro_batch_size) for n in rows) * entries,
        slice_rows=min(train.micro_batch_size, max(rows)),
        optimizer_steps=train.updates_per_step,
    )
