"""Thoroughness: long solutions leave out less."""

from __future__ import annotations

from collections.abc import Sequence

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

FULL = 80
"""Characters of a solution that leaves out nothing."""


@mmrl.reward(inputs=("text",), checks=True)
def thorough(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """The length in characters over ``FULL``, at most 1."""
    return [min(len((sample.text or "").strip()) / FULL, 1.0) for sample in samples]
