"""Clean samples noised afresh and predicted again, for objectives on the forward process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmrl.config.picture_algorithms import ForwardAlgorithm
from mmrl.controller.randomness import generator, noise
from mmrl.errors import UserError
from mmrl.pipelines.protocol import Weights
from mmrl.trajectory import Trajectory

if TYPE_CHECKING:
    from .flow import FlowPipeline


class Renoising:
    """Final class. The noised samples of a run of ``pipeline``, which calls it. Raises ``UserError`` where the recipe
    asks for guidance in the loss and the model takes none."""

    def __init__(self, pipeline: FlowPipeline) -> None:
        recipe, adapter = pipeline.recipe, pipeline.adapter
        own = getattr(recipe.algorithm, "guidance", None)
        if isinstance(own, float) and own > 1 and not adapter.combines:
            raise UserError(
                f"algorithm.guidance: this {adapter.family} makes one prediction and combines no two, so a loss has no "
                "guidance of its own; remove algorithm.guidance"
            )
        self.pipeline = pipeline
        algorithm = recipe.algorithm
        self.levels = algorithm.levels(pipeline.steps) if isinstance(algorithm, ForwardAlgorithm) else []
        asked = recipe.algorithm.loss_guidance(recipe.denoising.guidance_scale)
        self.guidance = asked if adapter.combines else 1.0

    @property
    def entries(self) -> int:
        """In how many levels a sample trains where the recipe names no number: one less than the rollout has steps, or
        as many as may train."""
        return min(self.pipeline.steps - 1, len(self.levels))

    def __call__(
        self, trajectory: Trajectory, level: int, seed: int, needs: frozenset[str], weights: Weights
    ) -> dict[str, Tensor]:
        """See ``mmrl.pipelines.protocol.Pipeline.renoise``."""
        pipeline, x0 = self.pipeline, trajectory.clean
        sigma = self._sigma(trajectory, level, seed).to(pipeline.device)
        eps = noise(seed, trajectory.ids, f"forward{level}", pipeline.shape).to(pipeline.device)
        s = sigma.view(-1, *[1] * (x0.ndim - 1))
        x_s = (1 - s) * x0 + s * eps
        features = pipeline._batch_features(trajectory.features, self.guidance > 1)
        timestep = pipeline.adapter.timestep(sigma)
        out = {"x0": x0, "x_s": x_s, "sigma": sigma} | ({"target": eps - x0} if "target" in needs else {})
        for name in sorted(name for name in needs if name.startswith("v_")):
            with torch.no_grad(), weights(name.removeprefix("v_")):
                out[name] = pipeline._velocity(x_s, timestep, features, self.guidance)
        out["v"] = pipeline._velocity(x_s, timestep, features, self.guidance)
        return out

    def _sigma(self, trajectory: Trajectory, level: int, seed: int) -> Tensor:
        """Of each row the noise level, ``[B]``: the ``level``-th of an order that is the sample's own."""
        sigmas = self.pipeline.adapter.schedule(self.pipeline.steps).sigmas[self.levels]
        draws = [generator(seed, i.step, i.slot, i.attempt, i.sample, "levels") for i in trajectory.ids]
        return sigmas[[int(torch.randperm(len(sigmas), generator=draw)[level]) for draw in draws]]
