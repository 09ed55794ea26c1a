"""The environment's own reward: the sum of what it gave in an episode (docs/environments.md)."""

from __future__ import annotations

from collections.abc import Sequence

import mmrl
from mmrl.core.reward_contract import Context, Failed, Value
from mmrl.core.trajectory import Sample


@mmrl.reward(inputs=("text",))
def score(samples: Sequence[Sample], *, context: Context) -> list[Value]:
    """The reward of each sample's episode. An episode that failed is left out of the update by the run itself."""
    none = Failed("it has no episode; set environment in the recipe")
    return [none if sample.episode is None else sample.episode.reward for sample in samples]
