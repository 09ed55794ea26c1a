"""Embeddings of pictures by the diffusion model that draws them, which reads a picture together with its prompt.

They are the error of its prediction at each place, and the means and the spreads of its last states, at two levels of
noise (``mmrl.rewards.encoders.pictures``). How large the error is stands apart: it bounds the likelihood of the picture
under its prompt, and alone tells much of what the model draws wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.rewards.encoders import described as kept
from mmrl.rewards.encoders.pictures import PictureReader

_PLACES = 8
"""Errors are kept for a grid of this side."""
_LEAST = 1e-12
"""Of an error whose log is taken."""


def described(recipe: Recipe) -> JsonObject:
    """The model of a recipe, as a reward's folder keeps it. Raises ``UserError`` for one that draws no pictures."""
    if recipe.makes != "image":
        raise UserError(f"--model: the recipe makes {recipe.makes}, and a model that draws pictures is needed")
    return kept.described(recipe)


class ModelReader:
    """Reads with the mean over so many ``noises``. Raises ``UserError`` where the model is not there any more."""

    def __init__(self, model: JsonObject, noises: int = 1) -> None:
        self.reader = PictureReader(model, "embeds pictures", "mmrl spread")
        self.noises = noises

    def parts(self, pictures: Sequence[Image.Image], prompts: Sequence[str]) -> list[Tensor]:
        """The states and the errors of pictures under their prompts, and at each level the log of the mean error: ``[B,
        D]`` each."""
        views = self.reader.under(pictures, prompts, self.noises)
        squared = [
            _mean([e.square().mean(1, keepdim=True) for e in level])
            for level in zip(*(v.errors for v in views), strict=True)
        ]
        errors = [adaptive_avg_pool2d(one, min(_PLACES, *one.shape[-2:])).flatten(1) for one in squared]
        states = [_mean([_summary(state) for state in level]) for level in zip(*(v.states for v in views), strict=True)]
        sizes = [one.flatten(1).mean(1, keepdim=True).clamp(min=_LEAST).log() for one in squared]
        return [torch.cat(part, 1) for part in (states, errors, sizes) if part]


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).mean(0)


def _summary(states: Tensor) -> Tensor:
    """Means and spreads over the places, of ``[B, places, C]`` or ``[B, C, H, W]``."""
    flat = states if states.ndim == 3 else states.flatten(2).transpose(1, 2)
    return torch.cat([flat.mean(1), flat.std(1)], 1)
