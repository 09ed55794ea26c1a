"""How a recipe weighs what an engine with weights of its own sampled, and the mean weight of a step's batch."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.algorithms.mismatch import Correction, summed_weights
from mmrl.training.batch import Batch
from mmrl.training.step_context import StepContext

SCALE = "importance_scale"
"""Of ``Batch.prepared``: what every row's weight is divided by."""


def correction_of(context: StepContext) -> Correction:
    """What the recipe says; ``auto`` weighs nothing where the weights that train also sampled, in the same process."""
    rollout = context.recipe.rollout
    same = rollout.engine == "transformers" and not context.rollout.strategy.staleness
    how = ("none" if same else "token") if rollout.importance == "auto" else rollout.importance
    return Correction(how, rollout.importance_cap, rollout.importance_floor, rollout.importance_mode, rollout.rejection)


def normalizes(context: StepContext) -> bool:
    """Whether weights are divided by their mean over the batch, for which log-probs are recomputed before the
    updates."""
    return context.recipe.rollout.importance_normalize == "batch"


def mean_weight(context: StepContext, batch: Batch, mask: Tensor) -> float:
    """The mean weight over the tokens of all controllers (of responses, where each has one weight), of rows that count;
    1 where all are 0. ``mask`` ``[B, T]``; ``batch.prepared`` has the trainer's log-probs. Controllers call it
    together."""
    engine = torch.zeros_like(mask)
    drawn = [None if t.log_probs is None else t.log_probs.float().cpu() for t in batch.micro_batches]
    for n, (m, i) in enumerate(batch.places):
        row = drawn[m]
        assert row is not None
        engine[n, : row.shape[1]] = row[i]
    counted = mask * batch.weights.unsqueeze(1)
    mine = summed_weights(batch.prepared["log_probs"], engine, counted, correction_of(context))
    total, count = context.controller.total(torch.stack(mine).double()).tolist()
    mean = total / max(1.0, count)
    return mean if mean > 1e-8 else 1.0
