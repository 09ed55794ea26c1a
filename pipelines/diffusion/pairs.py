"""Pairs of a better and a worse picture of one prompt: their latents, and the model's prediction errors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from mmrl.algorithms.sde import squared_distance
from mmrl.controller.randomness import generator, noise
from mmrl.errors import BadPromptError, UserError
from mmrl.media import BadMediaError, Media, open_image, read_bytes
from mmrl.pipelines.protocol import Weights
from mmrl.trajectory import Prompt, Rows, Slot
from mmrl.transfer import to_device

from . import pictures
from .predictor import Predictor

NAMES = ("chosen", "rejected")


class PicturePairs:
    """Final class. The pairs of a run of ``pipeline``. A prompt's ``media`` are the better picture and
    the worse one, in this order. Raises ``UserError`` for a family that makes clips, or edits pictures."""

    def __init__(self, pipeline: Predictor) -> None:
        if pipeline.adapter.makes != "image" or pipeline.adapter.edits:
            does = "makes clips" if pipeline.adapter.makes != "image" else "edits the picture that a prompt carries"
            raise UserError(
                f"algorithm.type: {pipeline.recipe.algorithm.type} trains on pairs of pictures, and "
                f"{pipeline.adapter.family} {does}; use an algorithm that samples"
            )
        self.pipeline = pipeline

    def encoded(self, prompt: Prompt) -> dict[str, Tensor]:
        """The clean latents of both pictures, ``chosen`` and ``rejected``, ``[C, H, W]`` float32 each.

        A picture of another size is scaled until it fills that of the prompt (``mmrl.datasets.buckets``) and cut at
        its centre. Raises ``BadPromptError`` where there is no pair, or one that cannot be trained on.
        """
        pipeline, found = self.pipeline, pair_of(prompt)
        size = pipeline.sizes.of(prompt)
        pixels = torch.stack([pictures.pixels(prompt, medium, size) for medium in found])
        with pipeline.offloaded.using(pipeline.adapter.vae), torch.no_grad():
            latents = pipeline.adapter.encode_image(pixels.to(pipeline.device)).float()
        return dict(zip(NAMES, latents, strict=True))

    def compare(self, rows: Rows, needs: frozenset[str], weights: Weights) -> dict[str, Tensor]:
        """What is needed of chosen_error and rejected_error, and the same of the reference without a graph: the squared
        distance of the predicted velocity from ``eps - x0``, mean over dimensions, ``[B]`` float32 each."""
        self.pipeline.offloaded.rest()  # what encoded the pairs
        latents = self._latents(rows.slots)
        x_s, target, timestep = self._noised(rows, latents)
        features = self.pipeline.batch_features(rows.slots * 2, guided=False)
        out = _halves(squared_distance(self.pipeline.predicted(x_s, timestep, features), target))
        if any(name.startswith("reference_") for name in needs):
            with torch.no_grad(), weights("reference"):
                errors = squared_distance(self.pipeline.predicted(x_s, timestep, features), target)
            out |= {f"reference_{name}": error for name, error in _halves(errors).items()}
        return out

    def key(self, prompt: Prompt) -> str:
        """Names the latents of a prompt's pair in the feature store: equal for the same pictures at the same size."""
        return self.pipeline.sizes.key(f"pair/{pictures.digest(prompt)}", prompt)

    def sizes(self, rows: Rows) -> list[int]:
        return [1] * len(rows)

    def _latents(self, slots: Sequence[Slot]) -> Tensor:
        """``[2 B, C, H, W]``: the better pictures, then the worse ones."""
        pairs = [self.pipeline.features.get(self.key(slot.prompt)) for slot in slots]
        return torch.stack([pair[name] for name in NAMES for pair in pairs])

    def _noised(self, rows: Rows, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States, velocities to predict and timesteps of ``latents``: both of a pair with one noise, at one level."""
        pipeline, seed = self.pipeline, self.pipeline.recipe.seed
        adapter = pipeline.sizes.adapted(rows.slots)
        sigmas = adapter.schedule(pipeline.steps).sigmas[: pipeline.steps]
        draws = [generator(seed, i.step, i.slot, i.attempt, i.sample, "pair level") for i in rows.ids]
        levels = [int(torch.randint(len(sigmas), (), generator=draw)) for draw in draws] * 2
        sigma = to_device(sigmas[levels].float(), latents.device)
        drawn = noise(seed, rows.ids, "pair", tuple(latents.shape[1:]))
        eps = to_device(drawn, latents.device).repeat(2, 1, 1, 1)
        s = sigma.view(-1, 1, 1, 1)
        return (1 - s) * latents + s * eps, eps - latents, adapter.timestep(sigma)


def pair_of(prompt: Prompt) -> tuple[Media, Media]:
    """The better and the worse picture of ``prompt``. Raises ``BadPromptError``."""
    if [medium.kind for medium in prompt.media] != ["image", "image"]:
        raise BadPromptError(
            prompt.id,
            f"it has {len(prompt.media)} media; a pair is the better picture and the worse one (data: images: [chosen, "
            "rejected])",
        )
    better, worse = prompt.media
    try:
        if read_bytes(better) == read_bytes(worse) or _same(open_image(better), open_image(worse)):
            raise BadPromptError(prompt.id, "its two pictures are the same, and none is the better; take it out")
    except BadMediaError as error:
        raise BadPromptError(prompt.id, f"{error}; mend the picture or take the pair out") from error
    return better, worse


def _same(one: Image.Image, other: Image.Image) -> bool:
    """Whether two pictures have equal pixels, whatever their files are."""
    return one.size == other.size and one.tobytes() == other.tobytes()


def _halves(errors: Tensor) -> dict[str, Tensor]:
    return {f"{name}_error": half for name, half in zip(NAMES, errors.chunk(2), strict=True)}
