"""Pictures and clips that a data set gives, for objectives that train on them without sampling.

Their latents are encoded once and kept in the feature store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from mmrl.algorithms.picture_sft import PictureSFTSettings
from mmrl.algorithms.sde import squared_distance
from mmrl.config.sampling import Size
from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.media import BadMediaError, Media, open_image, read_bytes
from mmrl.core.randomness import generator, noise
from mmrl.core.trajectory import Prompt, Rows, Slot
from mmrl.core.transfer import to_device
from mmrl.data.loading import lacks_media
from mmrl.models.protocol import Weights

from . import pictures
from .predictor import Predictor

NAMES = ("chosen", "rejected")


class Given(ABC):
    """The media of a run's prompts, in latents (abstract). Raises ``UserError`` for a family that cannot train so."""

    names: tuple[str, ...]
    """What the media of a prompt are, in their order."""

    def __init__(self, pipeline: Predictor) -> None:
        self.pipeline = pipeline

    @abstractmethod
    def media_of(self, prompt: Prompt) -> Sequence[Media]:
        """One medium for each of ``names``. Raises ``BadPromptError``."""

    @abstractmethod
    def compare(self, rows: Rows, needs: frozenset[str], weights: Weights) -> dict[str, Tensor]:
        """See ``mmrl.models.protocol.DenoisingPipeline.compare``."""

    def encoded(self, prompt: Prompt) -> dict[str, Tensor]:
        """The clean latents by name, ``[C, H, W]`` float32 each, those of clips ``[C, F, H, W]``.

        A picture of another size is scaled until it fills that of the prompt (``mmrl.data.buckets``) and cut at
        its centre. Raises ``BadPromptError`` where the media are not those that train.
        """
        pipeline, found = self.pipeline, self.media_of(prompt)
        size = pipeline.sizes.of(prompt)
        pixels = torch.stack([self._pixels(prompt, medium, size) for medium in found])
        with pipeline.offloaded.using(pipeline.adapter.vae), torch.no_grad():
            latents = pipeline.adapter.encode_image(pixels.to(pipeline.device)).float()
        return dict(zip(self.names, latents, strict=True))

    def key(self, prompt: Prompt) -> str:
        """Names the latents of a prompt in the feature store: equal for the same media at the same size."""
        return self.pipeline.sizes.key(f"given/{pictures.digest(prompt)}", prompt)

    def _pixels(self, prompt: Prompt, medium: Media, size: Size) -> Tensor:
        """A picture ``[3, H, W]``, or a clip ``[F, 3, H, W]``, in [-1, 1]."""
        adapter = self.pipeline.adapter
        if adapter.makes == "image":
            return pictures.scaled(pictures.fitted(prompt, medium, size))
        clip = pictures.frames(prompt, medium, size, adapter.sampling.frames or 1)
        return torch.stack([pictures.scaled(frame) for frame in clip])

    def sizes(self, rows: Rows) -> list[int]:
        return [1] * len(rows)

    def latents(self, slots: Sequence[Slot]) -> Tensor:
        """``[n B, ...]``: the first medium of all slots, then the second."""
        kept = [self.pipeline.features.get(self.key(slot.prompt)) for slot in slots]
        return torch.stack([one[name] for name in self.names for one in kept])


class PicturePairs(Given):
    """Final class. A prompt's ``media`` are the better picture and the worse one, in this order."""

    names = NAMES

    def __init__(self, pipeline: Predictor) -> None:
        super().__init__(pipeline)
        if pipeline.adapter.makes != "image" or pipeline.adapter.edits:
            does = "makes clips" if pipeline.adapter.makes != "image" else _STARTS
            raise UserError(
                f"algorithm.type: {pipeline.recipe.algorithm.type} trains on pairs of pictures, and "
                f"{pipeline.adapter.family} {does}; use an algorithm that samples"
            )

    def media_of(self, prompt: Prompt) -> tuple[Media, Media]:
        return pair_of(prompt)

    def compare(self, rows: Rows, needs: frozenset[str], weights: Weights) -> dict[str, Tensor]:
        """What is needed of chosen_error and rejected_error, and the same of the reference without a graph: the squared
        distance of the predicted velocity from ``eps - x0``, mean over dimensions, ``[B]`` float32 each."""
        self.pipeline.offloaded.rest()  # what encoded the pairs
        x_s, target, timestep = self.noised(rows, self.latents(rows.slots))
        features = self.pipeline.batch_features(rows.slots * 2, guided=False)
        out = _halves(squared_distance(self.pipeline.predicted(x_s, timestep, features), target))
        if any(name.startswith("reference_") for name in needs):
            with torch.no_grad(), weights("reference"):
                errors = squared_distance(self.pipeline.predicted(x_s, timestep, features), target)
            out |= {f"reference_{name}": error for name, error in _halves(errors).items()}
        return out

    def noised(self, rows: Rows, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States, velocities to predict and timesteps of ``latents``: both of a pair with one noise, at one level."""
        pipeline, seed = self.pipeline, self.pipeline.recipe.seed
        adapter = pipeline.sizes.adapted(rows.slots)
        sigmas = adapter.schedule().sigmas[: pipeline.steps]
        draws = [generator(seed, i.step, i.slot, i.attempt, i.sample, "pair level") for i in rows.ids]
        levels = [int(torch.randint(len(sigmas), (), generator=draw)) for draw in draws] * 2
        sigma = to_device(sigmas[levels].float(), latents.device)
        drawn = noise(seed, rows.ids, "pair", tuple(latents.shape[1:]))
        eps = to_device(drawn, latents.device).repeat(2, 1, 1, 1)
        s = sigma.view(-1, 1, 1, 1)
        return (1 - s) * latents + s * eps, eps - latents, adapter.timestep(sigma)


class GivenPictures(Given):
    """Final class. A prompt's one medium is the picture, or the clip, that the model learns to make of its text."""

    names = ("picture",)

    def __init__(self, pipeline: Predictor, settings: PictureSFTSettings) -> None:
        super().__init__(pipeline)
        self.settings, adapter = settings, pipeline.adapter
        if adapter.edits or adapter.sounds:
            why = _STARTS if adapter.edits else "learns sound, of which given clips are read without any"
            raise UserError(
                f"algorithm.type: {settings.type} trains on given pictures, and {adapter.family} {why}; use an "
                "algorithm that samples"
            )
        if not adapter.predicts_velocity and settings.density not in ("auto", "uniform"):
            raise UserError(
                f"algorithm.density: {adapter.family} is trained at timesteps that come equally often, and "
                f"{settings.density} is for flow models; remove it"
            )
        self.levels = adapter.levels()

    def media_of(self, prompt: Prompt) -> tuple[Media]:
        return (shown_by(self.pipeline.recipe, prompt, clips=self.pipeline.adapter.makes == "video"),)

    def compare(self, rows: Rows, needs: frozenset[str], weights: Weights) -> dict[str, Tensor]:
        """picture_error, the squared error of what the model itself predicts, mean over dimensions, and sigma, the
        noise level; ``[B]`` float32 each."""
        pipeline = self.pipeline
        pipeline.offloaded.rest()  # what encoded the pictures
        x0, sigma = self.latents(rows.slots), self.sigma(rows)
        eps = to_device(noise(pipeline.recipe.seed, rows.ids, "given", tuple(x0.shape[1:])), x0.device)
        s = sigma.float().view(-1, *[1] * (x0.ndim - 1))
        adapter = pipeline.sizes.adapted(rows.slots)
        features = pipeline.batch_features(rows.slots, guided=False)
        velocity = pipeline.predicted((1 - s) * x0 + s * eps, adapter.timestep(sigma), features)
        error = squared_distance(velocity, eps - x0) * adapter.own_error(sigma).float()
        return {"picture_error": error, "sigma": sigma.float()}

    def sigma(self, rows: Rows) -> Tensor:
        """The noise level of each row, ``[B]`` float64, drawn anew in every step."""
        seed, flow = self.pipeline.recipe.seed, self.pipeline.adapter.predicts_velocity
        draws = [generator(seed, i.step, i.slot, i.attempt, i.sample, "given level") for i in rows.ids]
        places = [self.settings.place(draw, flow=flow) for draw in draws]
        return self.levels[[int(place * len(self.levels)) for place in places]].to(self.pipeline.device)


_STARTS = "starts from the picture that a prompt carries"


def given_of(pipeline: Predictor) -> PicturePairs | GivenPictures | None:
    """What the recipe's algorithm trains on; None where it samples."""
    algorithm = pipeline.recipe.algorithm
    if isinstance(algorithm, PictureSFTSettings):
        return GivenPictures(pipeline, algorithm)
    return PicturePairs(pipeline) if algorithm.trains_on == "picture_pairs" else None


def shown_by(recipe: Recipe, prompt: Prompt, *, clips: bool) -> Media:
    """The picture that ``prompt`` describes, or with ``clips`` the clip. Raises ``BadPromptError``."""
    if why := lacks_media(recipe, prompt):
        raise BadPromptError(prompt.id, why)
    medium = prompt.media[0]
    if medium.kind == "video" and not clips:
        raise BadPromptError(prompt.id, "it has a clip, which this model does not make; give it a picture")
    return medium


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
