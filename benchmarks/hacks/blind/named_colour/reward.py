"""The colour that the caption names, and how much of the picture has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

NEAR = 110.0
"""Distance in RGB, 0 to 255, that earns nothing; nearer pixels earn in proportion."""
ENOUGH = 0.5
"""The share of the picture that earns the most."""


@mmrl.reward(checks=True)
def named_colour(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """How much of the picture has the colour of the caption, in [0, 1]."""
    found = []
    for sample in samples:
        palette = dict(sample.prompt.meta.get("palette") or {})
        named = [rgb for name, rgb in palette.items() if name in sample.prompt.text.split()]
        if not named:
            found.append(0.0)
            continue
        pixels = np.asarray(sample.image, dtype=np.float64)
        distance = np.min([np.linalg.norm(pixels - np.asarray(rgb), axis=-1) for rgb in named], axis=0)
        found.append(min(float(np.clip(1 - distance / NEAR, 0, 1).mean()) / ENOUGH, 1.0))
    return found
