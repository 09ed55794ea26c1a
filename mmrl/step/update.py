"""The update program: what an objective reads of a slice, computed with the current weights. Training, the tensors that
are prepared before the updates, and the plan of memory and time all run this."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mmrl.algorithms.objective import Objective
from mmrl.core.trajectory import Rows, denoised
from mmrl.models.protocol import Pipeline, Weights, of_pictures
from mmrl.step.batch import with_group_noise


def recompute(
    pipeline: Pipeline,
    objective: Objective,
    rows: Rows,
    entries: Sequence[int],
    needs: frozenset[str],
    seed: int,
    weights: Weights,
) -> dict[str, Tensor]:
    """The tensors ``needs`` of the ``entries`` of ``rows``, with an autograd graph where gradients are on: log-probs of
    what was sampled (policy gradient), velocities (forward process), or log-probs of given pairs (offline).

    All are float32, whatever the dtype of the weights. The reference acts here (of a pathwise objective in its
    sampling): ``weights("reference")`` has the model compute what is named after it (``reference_log_probs``,
    ``v_reference``), without a graph.

    Raises ``TypeError`` for a pathwise objective, which samples with a graph instead.
    """
    match objective.kind:
        case "policy_gradient":
            return pipeline.replay(rows, entries, needs, weights)
        case "forward_process":
            rows = with_group_noise(rows) if objective.shares_noise else rows
            return of_pictures(pipeline).renoise(denoised(rows), entries[0], seed, needs, weights)
        case "offline":
            return pipeline.compare(rows, needs, weights)
        case "pathwise":
            raise TypeError("a pathwise objective samples in its update, and recomputes nothing")
