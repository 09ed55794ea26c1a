"""How steady a clip is, by three measures of VBench (Huang et al. 2023, arXiv 2311.17982), each 1 at best.

- ``flicker``     1 - mean |frame - frame before| / 255 (temporal flickering; no model)
- ``subject``     mean over the frames but the first of (max(cos(f, f before), 0) + max(cos(f, f first), 0)) / 2, f the
                  features of DINO (subject consistency)
- ``background``  the same of CLIP's image features (background consistency)

A clip that stands still gets 1: have beside them what wants motion (``motion``, a judge with ``{{ clip }}``), or watch
them on held-out samples only. Departs: frames are prepared by the model's own processor, which brings them to a square;
VBench keeps DINO's frames in their shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.hub_files import check_files
from mmrl.core.library_loading import frozen, refused, try_processor
from mmrl.core.reward_contract import Context, Failed, weights_at
from mmrl.core.trajectory import Sample
from mmrl.rewards.sleeping import Sleeping

DINO, CLIP = "facebook/dino-vitb16", "openai/clip-vit-base-patch32"
AT_ONCE = 32
"""Frames in one forward pass."""
SHORT = Failed("a clip of one frame has nothing to compare")


@mmrl.reward(inputs=("video",), checks=True)
def flicker(samples: Sequence[Sample], *, context: Context | None = None) -> list[float | Failed]:
    """One number per clip, 0 to 1."""
    return [_flicker(sample.video or ()) for sample in samples]


def _flicker(frames: Sequence[Any]) -> float | Failed:
    if len(frames) < 2:
        return SHORT
    pixels = [np.asarray(frame, np.float32) for frame in frames]
    return 1 - float(np.mean([np.abs(b - a).mean() for a, b in pairwise(pixels)])) / 255


@mmrl.reward(inputs=("video",), device=True, paths=("path",), models=weights_at(DINO), checks=True)
class Subject(Sleeping):
    """Consistency by the class token of a ViT, 0 to 1. ``path``: a directory or hub name."""

    def __init__(self, path: str = DINO) -> None:
        self.model, self.images = self.kept(partial(_load, path, "a vision transformer (ViT, DINO, DINOv2)"))

    def score(self, samples: Sequence[Sample], *, context: Context) -> list[float | Failed]:
        """One number per clip."""
        self.wake(context.device)
        return _consistencies(self.model, self.images, samples, context)


@mmrl.reward(inputs=("video",), device=True, paths=("path",), models=weights_at(CLIP), checks=True)
class Background(Subject):
    """Consistency by a CLIP model's image features, 0 to 1. ``path``: a directory or hub name."""

    def __init__(self, path: str = CLIP) -> None:
        self.model, self.images = self.kept(partial(_load, path, "a CLIP model"))
        if not hasattr(self.model, "visual_projection"):
            raise UserError(f"options.path: {path} is no CLIP model; give one, or use vbench:subject")


subject = Subject
background = Background


def _load(path: str, what: str) -> tuple[Any, Any]:
    """The model, frozen and in float32 on the CPU, and its image processor. Raises ``UserError``."""
    from transformers import AutoImageProcessor, AutoModel

    check_files(path)
    mmrl.before_loading()
    with refused(
        lambda reason: (
            f"cannot load {what} from {path}: {reason}; set the reward's options.path to a "
            "directory that save_pretrained wrote, or to a hub name while online"
        )
    ):
        model = frozen(AutoModel, path, ("pooler.",)).float()
        images = AutoImageProcessor.from_pretrained(path)
        try_processor(images)
        return model, images


def _consistencies(model: Any, images: Any, samples: Sequence[Sample], context: Context) -> list[float | Failed]:
    clips = [sample.video or () for sample in samples]
    frames = [frame for clip in clips if len(clip) > 1 for frame in clip]
    rows = iter(_features(model, images, frames, context) if frames else ())
    return [consistency(np.stack([next(rows) for _ in clip])) if len(clip) > 1 else SHORT for clip in clips]


def _features(model: Any, images: Any, frames: Sequence[Any], context: Context) -> np.ndarray:
    """``[N, D]`` float32."""
    out = []
    with torch.no_grad():
        for start in range(0, len(frames), AT_ONCE):
            pixels = images(list(frames[start : start + AT_ONCE]), return_tensors="pt")["pixel_values"]
            out.append(_seen(model, pixels.to(context.device)).cpu())
    return torch.cat(out).numpy()


def _seen(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    if hasattr(model, "visual_projection"):
        return model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)
    return model(pixel_values=pixels).last_hidden_state[:, 0]


def consistency(features: np.ndarray) -> float:
    """VBench's measure of features ``[F, D]`` of a clip's frames, ``F`` at least 2."""
    f = features.astype(np.float64)
    f = f / np.linalg.norm(f, axis=1, keepdims=True)
    before, first = (f[1:] * f[:-1]).sum(1), f[1:] @ f[0]
    return float((np.maximum(before, 0) + np.maximum(first, 0)).mean() / 2)
