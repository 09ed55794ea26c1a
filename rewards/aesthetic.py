"""LAION's improved aesthetic predictor (Schuhmann 2022, github.com/christophschuhmann/improved-aesthetic-predictor).

A linear head over the normalised image embedding of CLIP ViT-L/14: about 1 to 10, whatever the prompt. ``path`` is
``sac+logos+ava1-l14-linearMSE.pth`` of that repository, ``clip`` the model whose embeddings it was trained on
(another of equal width would give numbers without a meaning). ``pathwise`` has a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context, Weights
from mmrl.core.trajectory import Sample
from mmrl.rewards.checkpoints import fill, read_tensors
from mmrl.rewards.sleeping import Sleeping, check_dtype, multiplying, single

from .clip import load_clip, resized

CLIP = "openai/clip-vit-large-patch14"
HIDDEN = (1024, 128, 64, 16)


def _models(options: Mapping[str, Any]) -> list[Weights]:
    return [Weights(str(options.get("clip", CLIP)), "float32"), Weights(str(options["path"]), "float32")]


@mmrl.reward(device=True, paths=("path", "clip"), models=_models, checks=True)
class Aesthetic(Sleeping):
    """The aesthetic score of each picture."""

    def __init__(self, path: str, clip: str = CLIP, dtype: str = "auto") -> None:
        self.dtype = check_dtype(dtype)
        self.model, self.images = self.kept(partial(_load, path, clip))

    def score(self, samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
        """``[B]``."""
        self.wake(context.device)
        return _rate(self.model, self._pixels(samples), context, self.dtype)

    def _pixels(self, samples: Sequence[Sample]) -> torch.Tensor:
        return self.images([s.image for s in samples], return_tensors="pt")["pixel_values"]


@mmrl.reward(inputs=("tensor",), differentiable=True, paths=("path", "clip"), checks=True)
class PathwiseAesthetic(Aesthetic):
    """The same with the gradient to ``sample.tensor``: pictures are resized on the way by torch (bicubic)."""

    def _pixels(self, samples: Sequence[Sample]) -> torch.Tensor:
        return resized(samples, self.model["vision"].config.image_size, self.images)


score = Aesthetic
pathwise = PathwiseAesthetic


def linear_head(width: int) -> torch.nn.Sequential:
    """``width`` numbers to one, through four layers with nothing but dropout between (it counts in the names)."""
    sizes = (width, *HIDDEN)
    layers: list[nn.Module] = [nn.Linear(a, b) for a, b in zip(sizes, HIDDEN, strict=False)]
    for i in (3, 2, 1):  # none after the fourth
        layers.insert(i, nn.Dropout())
    return nn.Sequential(*layers, nn.Linear(HIDDEN[-1], 1))


def _load(path: str, clip: str) -> tuple[Any, Any]:
    """The image half of a CLIP model with the head (frozen, float32, on the CPU), and its image processor."""
    mmrl.before_loading()
    tensors = {name.removeprefix("layers."): tensor for name, tensor in read_tensors(path).items()}
    whole, processor = load_clip(clip, clip, "clip")
    width, first = whole.config.projection_dim, tensors.get("0.weight")
    if first is not None and first.ndim == 2 and first.shape[1] != width:
        raise UserError(
            f"{path} reads embeddings of {first.shape[1]} numbers and {clip} makes {width}; "
            f"set options.clip to the model it was trained on ({CLIP})"
        )
    head = fill(lambda: linear_head(width), tensors, path)
    parts = {"vision": whole.vision_model, "projection": whole.visual_projection, "head": head}
    return nn.ModuleDict(parts), processor.image_processor


def _rate(model: Any, pixels: torch.Tensor, context: Context, dtype: str) -> torch.Tensor:
    """The head, whose numbers are the scores, is float32 whatever ``dtype`` is."""
    with multiplying(dtype, context.device):
        seen = model["projection"](model["vision"](pixel_values=pixels.to(context.device)).pooler_output)
    with multiplying("float32", context.device):
        return model["head"](torch.nn.functional.normalize(single(seen), dim=-1))[:, 0]
