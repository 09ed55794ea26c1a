"""PickScore (Kirstain et al. 2023, arXiv 2305.01569): CLIP-H tuned on people's choices between pictures.

The score is exp(logit_scale) * cosine / 26, which lies near 0.8 to 1 for good pictures; the division is Flow-GRPO's,
and only a scale. PickScore_v1 holds no processor, so that of its base model is read. Both may be directories.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

import mmrl
from mmrl.core.reward_contract import Context, weights_at
from mmrl.core.trajectory import Sample
from mmrl.rewards.sleeping import Sleeping, check_dtype

from .clip import cosine, load_clip, resized

SCALE = 26.0
DEFAULT = "yuvalkirstain/PickScore_v1"
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


@mmrl.reward(device=True, paths=("path", "processor"), models=weights_at(DEFAULT), checks=True)
class PickScore(Sleeping):
    """PickScore of each picture with its prompt."""

    def __init__(self, path: str = DEFAULT, processor: str = PROCESSOR, dtype: str = "auto") -> None:
        self.dtype = check_dtype(dtype)
        self.model, self.processor = self.kept(partial(load_clip, path, processor))

    def score(self, samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
        """``[B]``."""
        self.wake(context.device)
        found = cosine(self.model, self.processor, samples, self._pixels(samples), context, self.dtype)
        return self.model.logit_scale.exp() * found / SCALE

    def _pixels(self, samples: Sequence[Sample]) -> torch.Tensor:
        return self.processor.image_processor([s.image for s in samples], return_tensors="pt")["pixel_values"]


@mmrl.reward(inputs=("tensor",), differentiable=True, paths=("path", "processor"), checks=True)
class PathwisePickScore(PickScore):
    """The same with the gradient to ``sample.tensor``: pictures are resized on the way by torch (bicubic)."""

    def _pixels(self, samples: Sequence[Sample]) -> torch.Tensor:
        return resized(samples, self.model.config.vision_config.image_size, self.processor.image_processor)


score = PickScore
pathwise = PathwisePickScore
