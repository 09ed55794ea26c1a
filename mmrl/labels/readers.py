"""Embeddings of pictures by the diffusion model that draws them, which reads a picture together with its prompt.

The picture's latents get a fixed noise, at each of ``LEVELS``, and the model predicts under the prompt. Its error at
each place says how well the picture fits the prompt in the model's own view (as the diffusion classifier of Li et al.
2023, arXiv 2303.16203, uses it); beside it stand the means and the spreads of its last states. The model is frozen: it
is the one of the recipe, before training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

import mmrl
from mmrl.config.names import resolve, resolve_drop_in
from mmrl.config.schema import Recipe
from mmrl.errors import UserError
from mmrl.json_types import JsonObject, as_object, as_text
from mmrl.secrets import masked

if TYPE_CHECKING:
    from pipelines.diffusion.adapter import Adapter

LEVELS = (0.2, 0.5)
_PLACES = 8
"""Errors are kept for a grid of this side."""
_LAST = ("proj_out", "conv_out")
"""The last module of diffusers' models, whose input are their last states."""


def described(recipe: Recipe, root: Path) -> JsonObject:
    """The model of a recipe, as a reward's folder keeps it. Raises ``UserError`` for one that draws no pictures."""
    if recipe.makes != "image":
        raise UserError(f"--model: the recipe makes {recipe.makes}, and a model that draws pictures is needed")
    said = recipe.model_dump(mode="json")
    model = {**as_object(said["model"]), "path": resolve(root, recipe.model.path), "dtype": "float32"}
    own = {"pipeline": resolve_drop_in(root, recipe.pipeline), "model": model}
    nothing = {
        "rewards": [{"name": "jpeg:compressibility"}],
        "eval": {},
    }  # rewards may have secrets among their options
    return as_object(masked({**said, **own, **nothing}))


class ModelReader:
    """Raises ``UserError`` where the model is not there any more."""

    def __init__(self, model: JsonObject) -> None:
        try:
            recipe = Recipe.model_validate(model)
            path = Path(as_text(as_object(model["model"])["path"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"the model that embeds pictures is not known: {error}; run mmrl spread again") from error
        if path.is_absolute() and not path.is_dir():
            raise UserError(f"the model that embeds pictures is not at {path} any more; run mmrl spread again")
        family = mmrl.load("pipelines", recipe.pipeline)
        self.adapter: Adapter = family.build(recipe, str(path), torch.device("cpu")).adapter
        self.adapter.model.eval().requires_grad_(False)
        size = self.adapter.sampling.size
        self.size = size.width, size.height
        self.states: list[Tensor] = []
        last = next((getattr(self.adapter.model, n) for n in _LAST if hasattr(self.adapter.model, n)), None)
        if isinstance(last, nn.Module):
            last.register_forward_pre_hook(lambda _, given: self.states.append(given[0]))
        shape = self.adapter.latent_shape(size.height, size.width)
        self.noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.prompts: dict[str, Mapping[str, Tensor]] = {}

    @torch.no_grad()
    def parts(self, pictures: Sequence[Image.Image], prompts: Sequence[str]) -> list[Tensor]:
        """The states and the errors of pictures under their prompts, ``[B, D]`` each."""
        latents = self.adapter.encode_image(torch.stack([self._pixels(one) for one in pictures])).float()
        for prompt in {*prompts} - self.prompts.keys():
            self.prompts[prompt] = self.adapter.encode(prompt)
        rows = [self.prompts[prompt] for prompt in prompts]
        features = {name: torch.stack([row[name] for row in rows]).float() for name in rows[0]}
        states: list[Tensor] = []
        errors: list[Tensor] = []
        for level in LEVELS:
            self.states.clear()
            noised = (1 - level) * latents + level * self.noise
            timestep = self.adapter.timestep(torch.full((len(latents),), level))
            velocity = self.adapter.predict(self.adapter.model, noised, timestep, features).float()
            error = (velocity - (self.noise - latents)).square().mean(1, keepdim=True)
            side = min(_PLACES, *error.shape[-2:])
            errors.append(adaptive_avg_pool2d(error, side).flatten(1))
            states += [_summary(state.float()) for state in self.states]
        return [torch.cat(part, 1) for part in (states, errors) if part]

    def _pixels(self, picture: Image.Image) -> Tensor:
        fitted = ImageOps.fit(picture.convert("RGB"), self.size, Image.Resampling.BICUBIC)
        flat: Any = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
        return flat.view(fitted.height, fitted.width, 3).permute(2, 0, 1) / 127.5 - 1


def _summary(states: Tensor) -> Tensor:
    """Means and spreads over the places, of ``[B, places, C]`` or ``[B, C, H, W]``."""
    flat = states if states.ndim == 3 else states.flatten(2).transpose(1, 2)
    return torch.cat([flat.mean(1), flat.std(1)], 1)
