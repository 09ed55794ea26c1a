"""The model of a diffusion pipeline: what it predicts for prompts, and the noise that it starts from.

Forward-process objectives noise clean samples again and predict them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mmrl.algorithms import sde
from mmrl.algorithms.modality_routing import trained
from mmrl.config.algorithm_settings import ForwardSettings
from mmrl.config.schema import Recipe
from mmrl.controller.features import FeatureStore
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.offload import Offloaded, apart
from mmrl.core.randomness import generator, noise
from mmrl.core.trajectory import DenoisingRows, Prompt, SampleId, Slot
from mmrl.core.transfer import to_device
from mmrl.models.protocol import Weights

from . import pictures
from .adapter import Adapter, Schedule
from .negative import Negatives
from .sizes import Sizes


class Predictor:
    """``policy`` predicts, with LoRA or not; ``features`` holds what the prompts were encoded to."""

    def __init__(self, adapter: Adapter, policy: nn.Module, recipe: Recipe, device: torch.device) -> None:
        self.adapter, self.policy, self.recipe, self.device = adapter, policy, recipe, device
        self.features = FeatureStore(recipe.features.budget, recipe.features.folder)
        self.sizes = Sizes(adapter)
        self.shape = self.sizes.shapes[recipe.denoising.size]
        self.guided = adapter.guided
        self.guidance = recipe.denoising.guidance_scale if self.guided else 1.0
        half = recipe.model.dtype != "float32" and recipe.model.lora is None  # an adapter sees to it itself
        self.autocast = getattr(torch, recipe.model.dtype) if half else None
        self.steps = recipe.denoising.taken
        self.renoising = Renoising(adapter, recipe)
        guided_loss = max(self.renoising.guidance, self.renoising.reference_guidance) > 1
        self.negatives = Negatives(adapter, recipe.denoising, used=self.guided or guided_loss)
        moves = recipe.model.offload and apart(device)
        self.offloaded = Offloaded((*adapter.text_encoders, adapter.vae) if moves else (), device)
        self.sounds = bool(adapter.sounds)
        modalities = trained(recipe.rewards)
        self._counted = modalities[0] if adapter.sounds and len(modalities) == 1 else None

    def modalities(self, states: Tensor) -> dict[str, Tensor]:
        return self.adapter.modalities(states)

    def counted(self, states: Tensor) -> Tensor:
        """What log-probs and losses are of in states ``[B, ...]``: all, or the one modality that rewards train."""
        return states if self._counted is None else self.modalities(states)[self._counted]

    def key(self, prompt: Prompt) -> str:
        """Names the features of a prompt: its text, of a family that edits its picture too, and of several sizes its
        own. Raises ``BadPromptError``."""
        if prompt.turns:
            raise BadPromptError(prompt.id, "it is a conversation of several turns, and a picture is made of one text")
        name = f"{prompt.text}/{pictures.digest(prompt)}" if self.adapter.edits else prompt.text
        return self.sizes.key(name, prompt)

    def batch_features(self, slots: Sequence[Slot], *, guided: bool | None = None) -> dict[str, Tensor]:
        """The features ``[B, ...]`` of the prompts of ``slots``; guided ``[2 B, ...]``, the negative ones first."""
        rows = [self.features.get(self.key(slot.prompt)) for slot in slots]
        if self.guided if guided is None else guided:
            negatives = [self.features.get(self.negatives.key(slot.prompt)) for slot in slots]
            rows = [row | negative for row, negative in zip(rows, negatives, strict=True)] + rows
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def velocity(
        self, x: Tensor, timestep: Tensor, features: dict[str, Tensor], guidance: float | None = None
    ) -> Tensor:
        """Velocity ``[B, ...]`` float32 at ``timestep`` ``[B]``, with sampling's guidance or another; above 1 it takes
        ``features`` of the negative prompt, too."""
        scale = self.guidance if guidance is None else guidance
        if scale <= 1:
            return self.predicted(x, timestep, features)
        negative, positive = self.predicted(torch.cat([x, x]), torch.cat([timestep] * 2), features).chunk(2)
        return self.adapter.guide(negative, positive, self.adapter.scale(timestep, scale))

    def predicted(self, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        """The ``velocity`` of the rows as they are."""
        with torch.autocast(x.device.type, self.autocast, enabled=self.autocast is not None):
            return self.adapter.predict(self.policy, x, timestep, features).float()

    def initial(
        self, ids: Sequence[SampleId], seed: int, schedule: Schedule, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        if self.recipe.denoising.same_initial_noise:
            ids = [SampleId(i.step, i.slot, i.attempt, 0) for i in ids]
        return schedule.start * self.noise(ids, "initial", seed, shape or self.shape)

    def noise(self, ids: Sequence[SampleId], purpose: str, seed: int, shape: tuple[int, ...]) -> Tensor:
        return to_device(noise(seed, ids, purpose, shape), self.device)

    def coefficients(self, schedule: Schedule, actions: Sequence[int]) -> sde.Coefficients:
        settings = self.recipe.denoising.sde
        return sde.coefficients(schedule.sigmas, settings.kind, settings.noise_level, actions)


class Renoising:
    """Final class. Which noise levels of a rollout train, and with which ``guidance``; ``reference_guidance`` is the
    reference's. Raises ``UserError`` where the recipe asks for guidance in the loss and the model takes none."""

    def __init__(self, adapter: Adapter, recipe: Recipe) -> None:
        self.adapter, self.steps, algorithm = adapter, recipe.denoising.taken, recipe.algorithm
        self.sizes = Sizes(adapter)
        own = algorithm.guidance if isinstance(algorithm, ForwardSettings) else "sampling"
        if own != "sampling" and own > 1 and not adapter.combines:
            raise UserError(
                f"algorithm.guidance: this {adapter.family} makes one prediction and combines no two, so a loss has no "
                "guidance of its own; remove algorithm.guidance"
            )
        asked = algorithm.loss_guidance(recipe.denoising.guidance_scale)
        self.guidance = self.reference_guidance = asked if adapter.combines else 1.0
        if isinstance(algorithm, ForwardSettings):
            beside = algorithm.guidance_of_reference(recipe.denoising.guidance_scale)
            if beside != asked and beside > 1 and not adapter.combines:
                raise UserError(
                    f"algorithm.reference_guidance: this {adapter.family} makes one prediction and combines no two, so "
                    "that the reference has no guidance of its own; set algorithm.reference_guidance to loss"
                )
            self.reference_guidance = self.guidance if beside == asked else beside
        every = list(range(self.steps - 1))
        self.levels = every
        self._parts: int | None = None
        if isinstance(algorithm, ForwardSettings):
            self.levels = algorithm.levels(self.steps)
            self._parts = (algorithm.noise_levels or self.entries) if algorithm.stratified else None

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
        velocity: Callable[[Tensor, Tensor, float], Tensor],
    ) -> dict[str, Tensor]:
        """See ``mmrl.models.protocol.DenoisingPipeline.renoise``; ``velocity`` predicts for states and timesteps with a
        guidance."""
        x0 = self.adapter.free(rows.clean)
        sigma = to_device(self.sigma(rows, level, seed), x0.device)
        eps = to_device(noise(seed, rows.ids, f"forward{level}", tuple(x0.shape[1:])), x0.device)
        s = sigma.view(-1, *[1] * (x0.ndim - 1))
        x_s = (1 - s) * x0 + s * eps
        timestep = self.adapter.timestep(sigma)
        out = {"x0": x0, "x_s": x_s, "sigma": sigma} | ({"target": eps - x0} if "target" in needs else {})
        for name in sorted(name for name in needs if name.startswith("v_")):
            with torch.no_grad(), weights(name.removeprefix("v_")):
                scale = self.reference_guidance if name == "v_reference" else self.guidance
                out[name] = velocity(x_s, timestep, scale)
        out["v"] = velocity(x_s, timestep, self.guidance)
        return out

    def sigma(self, rows: DenoisingRows, level: int, seed: int) -> Tensor:
        """The noise level of each row, ``[B]``: the ``level``-th of an order that is the sample's own, or stratified a
        draw from the ``level``-th part."""
        sigmas = self.sizes.adapted(rows.slots).schedule().sigmas[self.levels]
        draws = [generator(seed, i.step, i.slot, i.attempt, i.sample, "levels") for i in rows.ids]
        if self._parts is not None:
            part = sigmas.tensor_split(self._parts)[level]
            return part[[int(torch.randint(len(part), (self._parts,), generator=draw)[level]) for draw in draws]]
        return sigmas[[int(torch.randperm(len(sigmas), generator=draw)[level]) for draw in draws]]
