"""How alike is a picture to given ones, a style or a subject? Cosine of image embeddings, with a guard against copies.

The embedding is that of a vision model of transformers: the image features of CLIP, SigLIP or a vision-language model
(the mean over its tokens), else the state of the first token, as DINOv2 has it. ``path`` is a directory or a hub name;
only safetensors weights are read.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.hub_files import check_files
from mmrl.core.library_loading import frozen, refused
from mmrl.core.media import KINDS, BadMediaError, Media, open_image
from mmrl.core.reward_contract import Context, weights_at
from mmrl.core.trajectory import Sample
from mmrl.core.untrusted import printable, walk
from mmrl.rewards.sleeping import Sleeping, check_dtype, multiplying, single

DEFAULT = "openai/clip-vit-large-patch14"
FEW = 5
"""Fewer pictures than this are no style."""
_BATCH = 64


class LeftOut(UserWarning):
    """Reference pictures that cannot be read, or are few; the message has their names and their number."""


@mmrl.reward(device=True, paths=("pictures", "path"), models=weights_at(DEFAULT), checks=True)
class Likeness(Sleeping):
    """``likeness``: the mean cosine with the ``nearest`` pictures of the folder ``pictures``; None takes all.

    ``nearest``: the cosine with the nearest one. Where it is above ``copy_above``, ``copied`` is 1, and ``score`` is
    ``likeness`` less 1 at a cosine of 1 and less 0 at ``copy_above``, linear between; None has no guard. Raises
    ``UserError`` for a folder without a picture that can be read; the others are named in a warning.
    """

    def __init__(
        self,
        pictures: str,
        path: str = DEFAULT,
        nearest: int | None = 5,
        copy_above: float | None = 0.95,
        dtype: str = "auto",
    ) -> None:
        if nearest is not None and nearest < 1:
            raise UserError(f"options.nearest is {nearest}; set it to 1 or more, or to null for all pictures")
        if copy_above is not None and not -1 < copy_above < 1:
            raise UserError(f"options.copy_above is {copy_above}; give a cosine below 1, or null for no guard")
        self.nearest, self.copy_above, self.dtype = nearest, copy_above, check_dtype(dtype)
        self.given = readable(Path(pictures))
        self.model, self.images = self.kept(partial(load_vision, path))
        self._references: Tensor | None = None

    def score(self, samples: Sequence[Sample], *, context: Context) -> dict[str, list[float]]:
        """Four parts, a number of each for every sample."""
        self.wake(context.device)
        if self._references is None:
            batches = [self.given[n : n + _BATCH] for n in range(0, len(self.given), _BATCH)]
            self._references = torch.cat([self._embedded([open_image(m) for m in b], context) for b in batches])
        shown = [sample.image for sample in samples if sample.image is not None]
        cosines = self._embedded(shown, context) @ self._references.T
        count = min(self.nearest or cosines.shape[1], cosines.shape[1])
        best = cosines.topk(count, dim=1).values
        likeness, nearest = best.mean(1), best[:, 0]
        over = torch.zeros_like(nearest)
        if self.copy_above is not None:
            over = ((nearest - self.copy_above) / (1 - self.copy_above)).clamp(min=0)
        parts = {"score": likeness - over, "likeness": likeness, "nearest": nearest, "copied": (over > 0).float()}
        return {name: part.tolist() for name, part in parts.items()}

    @torch.no_grad()
    def _embedded(self, pictures: Sequence[Image.Image], context: Context) -> Tensor:
        """``[B, D]`` float32 of length 1, on the CPU."""
        inputs = self.images(list(pictures), return_tensors="pt").to(context.device)
        with multiplying(self.dtype, context.device):
            if hasattr(self.model, "get_image_features"):
                found = self.model.get_image_features(**inputs)
                found = getattr(found, "pooler_output", found)
            else:
                found = self.model(**inputs).last_hidden_state[:, 0]
        rows = [
            one.mean(0) if one.ndim == 2 else one for one in found
        ]  # a vision-language model has one for each token
        return normalize(single(torch.stack(rows)), dim=1).cpu()


score = Likeness


def readable(folder: Path) -> list[Media]:
    """The pictures in ``folder`` and the folders in it, by name. Those that cannot be read are left out, and named in a
    warning. Raises ``UserError`` where none is left."""
    if not folder.is_dir():
        raise UserError(f"options.pictures: {folder} is no folder; name one with pictures in it")
    found, bad = list[Media](), list[str]()
    for file in walk(folder):
        if KINDS.get(file.suffix[1:].lower()) != "image" or file.name.startswith("."):
            continue
        try:
            open_image(medium := Media("image", path=str(file)))
            found.append(medium)
        except BadMediaError as error:
            bad.append(f"{printable(file.name)} ({str(error).rpartition(': ')[2]})")
    if not found:
        said = f": {'; '.join(bad[:5])}" if bad else ""
        raise UserError(f"options.pictures: {folder} has no picture that can be read{said}; put some into it")
    if bad:
        _warn(f"{folder}: {len(bad)} of {len(bad) + len(found)} pictures cannot be read and are left out: {bad[:5]}")
    if len(found) < FEW:
        _warn(
            f"{folder} has {len(found)} picture{'s' * (len(found) > 1)}: likeness to so few is likeness to each of "
            f"them, not to a style; add more ({FEW} at least, 20 or more for a style)"
        )
    return found


def _warn(said: str) -> None:
    warnings.warn(f"likeness: {said}", LeftOut, stacklevel=2)


def load_vision(path: str) -> tuple[Any, Any]:
    """A vision model (frozen, float32, on the CPU) and its image processor. Raises ``UserError``."""
    from transformers import AutoImageProcessor, AutoModel

    check_files(path)
    mmrl.before_loading()
    with refused(
        lambda reason: (
            f"cannot load a vision model from {path}: {reason}; set the reward's options.path to a directory of "
            "transformers (CLIP, DINOv2), or to a hub name while online"
        )
    ):
        images = AutoImageProcessor.from_pretrained(path)
        return frozen(AutoModel, path, ("pooler.",), dtype=torch.float32), images
