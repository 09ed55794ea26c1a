"""Noise clean samples again and predict them, for forward-process objectives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmrl.algorithms.settings import ForwardSettings
from mmrl.config.schema import Recipe
from mmrl.controller.randomness import generator, noise
from mmrl.errors import UserError
from mmrl.pipelines.protocol import Weights
from mmrl.trajectory import DenoisingRows
from mmrl.transfer import to_device

from .adapter import Adapter
from .sizes import Sizes


class Renoising:
    """Final class. Which noise levels of a rollout train, and with which guidance. Raises ``UserError`` where the
    recipe asks for guidance in the loss and the model takes none."""

    def __init__(self, adapter: Adapter, recipe: Recipe) -> None:
        self.adapter, self.steps, algorithm = adapter, recipe.denoising.steps, recipe.algorithm
        self.sizes = Sizes(adapter)
        own = algorithm.guidance if isinstance(algorithm, ForwardSettings) else "sampling"
        if own != "sampling" and own > 1 and not adapter.combines:
            raise UserError(
                f"algorithm.guidance: this {adapter.family} makes one prediction and combines no two, so a loss has no "
                "guidance of its own; remove algorithm.guidance"
            )
        asked = algorithm.loss_guidance(recipe.denoising.guidance_scale)
        self.guidance = asked if adapter.combines else 1.0
        every = list(range(self.steps - 1))
        self.levels = algorithm.levels(self.steps) if isinstance(algorithm, ForwardSettings) else every

    @property
    def entries(self) -> int:
        """In how many levels a sample trains where the recipe names no number: one less than the rollout has steps, or
        as many as may train."""
        return min(self.steps - 1, len(self.levels))

    def __call__(
        self,
        rows: DenoisingRows,
        level: int,
        seed: int,
        needs: frozenset[str],
        weights: Weights,
        velocity: Callable[[Tensor, Tensor], Tensor],
    ) -> dict[str, Tensor]:
        """See ``mmrl.pipelines.protocol.DenoisingPipeline.renoise``; ``velocity`` predicts for states and timesteps."""
        x0 = rows.clean
        sigma = to_device(self.sigma(rows, level, seed), x0.device)
        eps = to_device(noise(seed, rows.ids, f"forward{level}", tuple(x0.shape[1:])), x0.device)
        s = sigma.view(-1, *[1] * (x0.ndim - 1))
        x_s = (1 - s) * x0 + s * eps
        timestep = self.adapter.timestep(sigma)
        out = {"x0": x0, "x_s": x_s, "sigma": sigma} | ({"target": eps - x0} if "target" in needs else {})
        for name in sorted(name for name in needs if name.startswith("v_")):
            with torch.no_grad(), weights(name.removeprefix("v_")):
                out[name] = velocity(x_s, timestep)
        out["v"] = velocity(x_s, timestep)
        return out

    def sigma(self, rows: DenoisingRows, level: int, seed: int) -> Tensor:
        """Of each row the noise level, ``[B]``: the ``level``-th of an order that is the sample's own."""
        sigmas = self.sizes.adapted(rows.slots).schedule(self.steps).sigmas[self.levels]
        draws = [generator(seed, i.step, i.slot, i.attempt, i.sample, "levels") for i in rows.ids]
        return sigmas[[int(torch.randperm(len(sigmas), generator=draw)[level]) for draw in draws]]
