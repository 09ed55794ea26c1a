"""Several rewards, one advantage: an advantage of each, then their weighted sum (``advantage_aggregation``).

    each: A = sum_i weight_i A(r_i)                    (MixGRPO, arXiv 2507.21802)
    gdpo: A' = (A - mean) / (std + 1e-4) over the batch   (GDPO, arXiv 2601.05242)

The advantage of the rewards' sum is dominated by the reward that varies most, whatever the weights. Separate advantages
have the same scale before they are weighted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from mmrl.algorithms.advantages import EPSILON, Advantages, batch_statistics, flat_groups
from mmrl.algorithms.objective import Scored
from mmrl.config.algorithm_settings import AdvantageAggregation


def aggregated(of: Callable[[Scored], Advantages], scored: Scored, how: AdvantageAggregation) -> Advantages:
    """The advantages of a batch by ``of``, an objective's function that returns ``[B]``, combined as ``how`` says.

    A group counts as flat if every reward is equal in it. All controllers must call it equally often.
    """
    if how == "sum" or not scored.parts:
        return of(scored)
    alone = [of(replace(scored, rewards=values, parts=())) for _, values in scored.parts]
    values = torch.stack([weight * a.values.double() for (weight, _), a in zip(scored.parts, alone, strict=True)]).sum(
        0
    )
    flat = torch.stack([flat_groups(values, scored.groups) for _, values in scored.parts]).all(0)
    valid = alone[0].valid
    if how == "gdpo":
        mean, variance = batch_statistics(values, valid, scored.all_sum)
        values = torch.where(valid & ~flat[scored.groups], (values - mean) / (variance.sqrt() + EPSILON), 0.0)
    return Advantages(values.float(), valid, len(flat), int(flat.sum()), metrics=alone[0].metrics)
