"""Exact counts of a step's operations, from the recipe alone."""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.config.midway import Midway
from mmrl.config.schema import Recipe


@dataclass(frozen=True)
class Counts:
    """The counts of one step, on the controller with the most work.

    ``batch`` and ``slice_rows`` are the samples of the largest micro-batch of sampling and of the largest slice of
    training. A pathwise objective samples inside its slices and an offline one does not sample, so neither has
    micro-batches of sampling.

    For text, ``row_tokens`` is the longest row, prompt and response (0 for pictures). Forwards of sampling and slices
    are upper limits: responses may end earlier, and short rows share a slice. Rows of very different length may take
    more slices if that saves more padding than it costs (``mmrl.controller.workload_balance.pack``).
    """

    prompts: int
    samples: int
    batch: int
    micro_batches: int
    sampling_forwards: int
    entries: int
    slices: int
    slice_rows: int
    optimizer_steps: int
    row_tokens: int = 0
    at_once: int = 1
    """Entries of a row in one slice."""
    shared_steps: float = 0
    """Denoising steps before the window that the samples of a group share; the mean over the run's steps."""
    saved_steps: int = 0
    """Denoising steps of single samples that are therefore not computed, if one device samples."""
    begun: int = 0
    """Samples that are begun if ``midway`` prunes groups; ``samples`` of them are finished."""
    predicted: int = 0
    """Results predicted before recorded steps, which are decoded and scored beside ``samples`` (``scores_steps``)."""
    sample_steps: int = 0
    """Denoising steps of single samples that are computed, if one device samples. Of text: tokens at most."""

    @property
    def passes(self) -> int:
        """Number of slices of an update that contain the same row."""
        return -(-self.entries // self.at_once)


def count(
    recipe: Recipe, entries: int, row_tokens: int = 0, *, sampled: bool = True, shared_steps: float = 0
) -> Counts:
    """Count as ``mmrl.training.loop`` divides the work. ``entries``: actions or noise levels of a sample per update;
    ``sampled``: samples are drawn before the updates; ``row_tokens`` and ``shared_steps`` as in ``Counts``."""
    train = recipe.train
    prompts = -(-train.prompts_per_step // recipe.controllers)
    samples = prompts * train.group_size
    batch = recipe.sampled_at_once if sampled else samples
    begun = prompts * recipe.midway.group_size if recipe.midway is not None else 0
    turns = [
        sum(k % train.updates_per_step == u for k in range(train.group_size)) for u in range(train.updates_per_step)
    ]
    rows = [n * prompts for n in turns] if sampled else [samples]
    if recipe.algorithm.whole == "pair":  # the rest of a group has no weight
        rows = [2 * prompts]
    most = train.micro_batch_size
    if train.micro_batch_tokens is not None and row_tokens:
        most = min(most, max(1, train.micro_batch_tokens // row_tokens))
    return Counts(
        prompts=prompts,
        samples=samples,
        batch=min(batch, samples),
        micro_batches=-(-samples // batch) if sampled else 0,
        sampling_forwards=_forwards(recipe, samples, begun, batch, shared_steps) if sampled else 0,
        entries=entries,
        slices=sum(-(-n // most) for n in rows) * -(-entries // train.at_once),
        slice_rows=min(most, max(rows)),
        optimizer_steps=train.updates_per_step,
        row_tokens=row_tokens,
        at_once=train.at_once,
        shared_steps=shared_steps,
        saved_steps=round(shared_steps * ((begun or samples) - prompts)),
        begun=begun,
        predicted=samples * entries_recorded(recipe) if recipe.algorithm.scores_steps else 0,
        sample_steps=_sample_steps(recipe, samples, begun) - round(shared_steps * ((begun or samples) - prompts)),
    )


def entries_recorded(recipe: Recipe) -> int:
    """The denoising steps of a picture that are recorded."""
    window = recipe.denoising.window
    return window.size if window else recipe.denoising.taken - 1


def _sample_steps(recipe: Recipe, samples: int, begun: int) -> int:
    """Denoising steps of all samples, if none were shared."""
    if recipe.midway is None:
        return samples * forwards_of_a_sample(recipe)
    early, kept = _early(recipe, recipe.midway)
    return begun * early + samples * (forwards_of_a_sample(recipe) - kept)


def _early(recipe: Recipe, midway: Midway) -> tuple[int, int]:
    """Denoising steps, or tokens, of a sample before its group is pruned, and how many of them the finished samples
    need not take again: none of a draft's."""
    if midway.draft_steps is not None:
        return recipe.denoising.takes(midway.draft_steps), 0
    early = midway.at + (recipe.makes != "text")  # the prediction of a picture is the next step's
    return early, early


def _forwards(recipe: Recipe, samples: int, begun: int, batch: int, shared_steps: float) -> int:
    """The model's calls while a step is sampled."""
    size, steps = recipe.train.group_size, forwards_of_a_sample(recipe)
    early, late = steps, 0
    if recipe.midway is not None:
        size, (early, kept) = recipe.midway.group_size, _early(recipe, recipe.midway)
        late = -(-samples // batch) * (steps - kept)
    first = [range(start, min(start + batch, begun or samples)) for start in range(0, begun or samples, batch)]
    shared = sum(_begun(chunk, size) for chunk in first) * shared_steps
    return round(len(first) * (early - shared_steps) + shared + late)


def _begun(chunk: range, size: int) -> int:
    """How many batches the groups that begin in a micro-batch have before the window: one of all whole groups, and one
    of the group that goes on in the next micro-batch (``pipelines/diffusion/denoiser.py``)."""
    firsts = [n for n in chunk if n % size == 0]
    return len({n + size <= chunk.stop for n in firsts})


def forwards_of_a_sample(recipe: Recipe) -> int:
    """Denoising steps, or the most tokens: the prompt's forward gives the first one."""
    return recipe.written_tokens if recipe.sampling.type == "text" else recipe.denoising.taken
