"""The importance weights of a recipe for samples of an engine with its own copy of the weights, and their mean."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.algorithms.mismatch import Correction, summed_weights
from mmrl.step.batch import Batch
from mmrl.step.step_context import StepContext

SCALE = "importance_scale"
"""The key of ``Batch.prepared`` whose value divides every row's weight."""


def correction_of(context: StepContext) -> Correction:
    """The recipe's correction; ``auto`` means none if the trained weights also sampled, in the same process."""
    rollout = context.recipe.rollout
    same = rollout.in_process and not context.rollout.strategy.staleness
    how = ("none" if same else "token") if rollout.importance == "auto" else rollout.importance
    return Correction(how, rollout.importance_cap, rollout.importance_floor, rollout.importance_mode, rollout.rejection)


def normalizes(context: StepContext) -> bool:
    """Whether weights are divided by their mean over the batch, which needs log-probs recomputed before the updates."""
    return context.recipe.rollout.importance_normalize == "batch"


def mean_weight(context: StepContext, batch: Batch, mask: Tensor) -> float:
    """The mean weight over the tokens (or responses, if each has one weight) of all controllers' rows that count; 1 if
    all weights are 0. ``mask`` ``[B, T]``; ``batch.prepared`` has the trainer's log-probs. All controllers call it
    together."""
    counted = mask * batch.weights.unsqueeze(1)
    mine = summed_weights(batch.prepared["log_probs"], batch.of_tokens("log_probs"), counted, correction_of(context))
    total, count = context.controller.total(torch.stack(mine).double()).tolist()
    mean = total / max(1.0, count)
    return mean if mean > 1e-8 else 1.0
