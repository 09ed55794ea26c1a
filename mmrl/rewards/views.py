"""Copy samples for a reward, so that its changes do not affect training or other rewards.

Rewards run at once, on samples that training, the saved grids and the other rewards read too. Imports no torch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmrl.core.trajectory import Sample


def views(samples: Sequence[Sample]) -> list[Sample]:
    """A copy of each sample for one call of one reward; samples of one prompt share nothing either.

    A tensor that carries a graph keeps it: gradients reach the original through the copy.
    """
    return [_view(sample) for sample in samples]


def _view(sample: Sample) -> Sample:
    prompt = sample.prompt
    return replace(
        sample,
        prompt=replace(prompt, meta=own(prompt.meta), media=tuple(copy.copy(medium) for medium in prompt.media)),
        id=copy.copy(sample.id),
        image=own(sample.image),
        tensor=own(sample.tensor),
        video=own(sample.video),
        audio=None if sample.audio is None else sample.audio._replace(wave=own(sample.audio.wave)),
    )


def own(value: Any) -> Any:
    """A copy of JSON values, pictures and tensors that shares nothing with them that can change."""
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if isinstance(value, Mapping):
        return {key: own(item) for key, item in value.items()}
    if isinstance(value, list):
        return [own(item) for item in value]
    if isinstance(value, tuple):
        return tuple(own(item) for item in value)
    for name in ("clone", "copy"):  # of tensors; of pictures and arrays
        if hasattr(value, name):
            return getattr(value, name)()
    return copy.deepcopy(value)
