"""A diffusion model reads a picture together with a prompt, without drawing.

The picture's latents get a fixed noise, at each of ``LEVELS``, and the model predicts under the prompt; where several
noises are asked, every second one is the opposite of the one before. Its error at each place says how well the picture
fits the prompt in the model's own view (as the diffusion classifier of Li et al. 2023, arXiv 2303.16203, uses it);
beside it stand its last states. The model is frozen: it is the one of the recipe, before training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.rewards.encoders.described import opened

if TYPE_CHECKING:
    from pipelines.diffusion.adapter import Adapter

LEVELS = (0.2, 0.5)
_LAST = ("proj_out", "conv_out")
"""The last module of diffusers' models, whose input are their last states."""


@dataclass(frozen=True)
class Views:
    """What the model sees of ``B`` pictures: their ``latents`` ``[B, C, h, w]``, and for each level the ``errors`` of
    its velocity ``[B, C, h, w]`` and its last ``states`` ``[B, places, D]`` or ``[B, D, h, w]`` (none for a model whose
    last module has no known name)."""

    latents: Tensor
    errors: list[Tensor]
    states: list[Tensor]


class PictureReader:
    """Opens the model that ``described`` kept. ``what`` it does and the command to run ``again`` are for messages.

    Raises ``UserError`` where the model is not there any more, and for one that edits pictures.
    """

    def __init__(self, model: JsonObject, what: str, again: str) -> None:
        recipe, path = opened(model, what, again)
        family = mmrl.load("pipelines", recipe.pipeline)
        pipeline = family.build(recipe, path, torch.device("cpu"))
        if not hasattr(pipeline, "adapter"):
            raise UserError(f"the model that {what} is no diffusion model of ours")
        self.adapter: Adapter = pipeline.adapter
        if self.adapter.edits:
            raise UserError(f"the model that {what} edits pictures, and reads none without the one it edits")
        self.adapter.model.eval().requires_grad_(False)
        size = self.adapter.sampling.size
        self.size = size.width, size.height
        self._states: list[Tensor] = []
        last = next((getattr(self.adapter.model, n) for n in _LAST if hasattr(self.adapter.model, n)), None)
        if isinstance(last, nn.Module):
            last.register_forward_pre_hook(lambda _, given: self._states.append(given[0]))
        self.shape = self.adapter.latent_shape(size.height, size.width)
        self._prompts: dict[str, Mapping[str, Tensor]] = {}

    @property
    def modules(self) -> nn.ModuleList:
        """All that computes."""
        return nn.ModuleList([self.adapter.model, self.adapter.vae, *self.adapter.text_encoders])

    def at(self, device: torch.device | str) -> None:
        """Read on ``device`` from now on, where ``modules`` are."""
        self.adapter.device = torch.device(device)

    def prompts(self, texts: Sequence[str]) -> list[Mapping[str, Tensor]]:
        """What the model is given of each prompt."""
        for text in dict.fromkeys(texts):
            if text not in self._prompts:
                made = self.adapter.encode(text)
                self._prompts[text] = {name: of.cpu() for name, of in made.items()}
        return [self._prompts[text] for text in texts]

    def views(self, pictures: Sequence[Image.Image], prompts: Sequence[str]) -> Views:
        """What the model sees of pictures under their prompts."""
        return self.under(pictures, prompts, 1)[0]

    @torch.no_grad()
    def under(self, pictures: Sequence[Image.Image], prompts: Sequence[str], noises: int) -> list[Views]:
        """What the model sees of pictures under their prompts, with each of so many noises."""
        device = self.adapter.device
        pixels = torch.stack([self._pixels(one) for one in pictures]).to(device)
        latents = self.adapter.encode_image(pixels).float()
        rows = self.prompts(prompts)
        features = {name: torch.stack([row[name] for row in rows]).float().to(device) for name in rows[0]}
        return [self._views(latents, features, self.noise(n).to(device)) for n in range(noises)]

    def noise(self, n: int) -> Tensor:
        """Noise ``n`` ``[C, h, w]``; an odd one is the opposite of the one before."""
        drawn = torch.randn(self.shape, generator=torch.Generator().manual_seed(n // 2))
        return -drawn if n % 2 else drawn

    def _views(self, latents: Tensor, features: dict[str, Tensor], noise: Tensor) -> Views:
        found = Views(latents, [], [])
        for level in LEVELS:
            self._states.clear()
            noised = (1 - level) * latents + level * noise
            timestep = self.adapter.timestep(torch.full((len(latents),), level, device=latents.device))
            velocity = self.adapter.predict(self.adapter.model, noised, timestep, features).float()
            found.errors.append(velocity - (noise - latents))
            found.states.extend(state.float() for state in self._states)
        self._states.clear()
        return found

    def _pixels(self, picture: Image.Image) -> Tensor:
        fitted = ImageOps.fit(picture.convert("RGB"), self.size, Image.Resampling.BICUBIC)
        flat: Any = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
        return flat.view(fitted.height, fitted.width, 3).permute(2, 0, 1) / 127.5 - 1
