"""Light: does it fall from above?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

LUMA = (0.299, 0.587, 0.114)


@mmrl.reward(checks=True)
def from_above(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """The mean brightness of the upper half less that of the lower one, in [-1, 1]."""
    found = []
    for sample in samples:
        grey = np.asarray(sample.image, dtype=np.float64) @ LUMA / 255
        half = len(grey) // 2
        found.append(float(grey[:half].mean() - grey[half:].mean()))
    return found
