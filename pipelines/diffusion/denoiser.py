"""The sampling of a diffusion pipeline, at once or in two parts.

In two parts (``midway``) more samples are begun than are trained on. ``begin`` denoises a micro-batch to the step at
which it is judged and predicts the clean results there, as ``x0 = x - s v``. ``finish`` denoises those samples to the
end that were kept. The velocity ``v`` of the prediction is that of the next step, which does not compute it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmrl import finite
from mmrl.algorithms import sde
from mmrl.algorithms.solver import NoiselessSteps, Solver
from mmrl.config.schema import Recipe
from mmrl.trajectory import DenoisingRows, SampleId, Slot

from .adapter import Adapter, Schedule
from .predictor import Predictor
from .prefix import Features, SharedPrefix


class _Rows(NamedTuple):
    """A micro-batch and how it is denoised."""

    slots: Sequence[Slot]
    ids: Sequence[SampleId]
    actions: Sequence[int]
    seed: int
    schedule: Schedule
    shape: tuple[int, ...]
    features: Features
    c: sde.Coefficients
    steps: int
    tuned: int
    """The first step that the model without its adapter takes."""
    solver: Solver


class _State:
    """Where denoising stands: the latents, and what was recorded so far."""

    def __init__(self, x: Tensor, noiseless: NoiselessSteps) -> None:
        self.x, self.noiseless = x, noiseless
        self.states: list[Tensor] = []
        self.log_probs: list[Tensor] = []
        self.finite: list[Tensor] = []
        self.velocity: Tensor | None = None
        """At ``x``, where it is known."""


class Denoiser(Predictor):
    """Samples micro-batches."""

    def __init__(self, adapter: Adapter, policy: nn.Module, recipe: Recipe, device: torch.device) -> None:
        super().__init__(adapter, policy, recipe, device)
        self.prefix = SharedPrefix(recipe)

    @torch.no_grad()
    def sample(
        self,
        slots: Sequence[Slot],
        ids: Sequence[SampleId],
        actions: Sequence[int],
        seed: int,
        *,
        evaluate: bool = False,
        version: tuple[int, str] | None = None,
    ) -> DenoisingRows:
        rows = self._rows(slots, ids, actions, seed, evaluate=evaluate)
        state, first = self._started(rows, version)
        self._denoise(rows, state, first, rows.steps)
        return self._made(rows, state, rows.schedule.end * state.x)

    @torch.no_grad()
    def begin(
        self,
        slots: Sequence[Slot],
        ids: Sequence[SampleId],
        actions: Sequence[int],
        seed: int,
        until: int,
        version: tuple[int, str] | None = None,
    ) -> DenoisingRows:
        rows = self._rows(slots, ids, actions, seed)
        state, first = self._started(rows, version)
        self._denoise(rows, state, first, until)
        velocity = self._velocity(rows, state.x, until, rows.features)
        predicted = state.x - rows.schedule.sigmas[until].item() * velocity
        finite.check_steps([*state.finite, predicted.flatten(1).isfinite().all(1)], ids)
        made = self._made(rows, state, predicted)
        before = state.noiseless.before
        made.paused = torch.stack([state.x, velocity, *([] if before is None else [before])], 1)
        return made

    @torch.no_grad()
    def finish(self, begun: DenoisingRows, actions: Sequence[int], seed: int, at: int) -> DenoisingRows:
        assert begun.paused is not None
        rows = self._rows(begun.slots, begun.ids, actions, seed)
        latents, velocity, *before = begun.paused.unbind(1)
        state = _State(latents, self._noiseless(rows))
        state.velocity, state.noiseless.before = velocity, before[0] if before else None
        state.finite = [torch.ones(len(begun), dtype=torch.bool, device=state.x.device)] * at  # ``begin`` checked them
        if begun.states is not None and begun.log_probs is not None:
            state.states, state.log_probs = list(begun.states.unbind(1)), list(begun.log_probs.unbind(1))
        self._denoise(rows, state, at, rows.steps)
        return self._made(rows, state, rows.schedule.end * state.x)

    def _rows(
        self,
        slots: Sequence[Slot],
        ids: Sequence[SampleId],
        actions: Sequence[int],
        seed: int,
        *,
        evaluate: bool = False,
    ) -> _Rows:
        recipe = self.recipe
        steps = (recipe.eval.steps if evaluate else None) or self.steps
        solver = (recipe.eval.solver if evaluate else None) or recipe.denoising.solver
        schedule, shape = self.sizes.adapted(slots).schedule(steps), self.sizes.shape(slots)
        features, c = self.batch_features(slots), self.coefficients(schedule, actions)
        tuned = round(recipe.eval.tuned_fraction * steps) if evaluate else steps
        return _Rows(slots, ids, actions, seed, schedule, shape, features, c, steps, tuned, solver)

    def _started(self, rows: _Rows, version: tuple[int, str] | None) -> tuple[_State, int]:
        """The initial noise, or the latents after the steps that the samples of a group share; and the next step."""
        noiseless = self._noiseless(rows)
        state = _State(self.initial(rows.ids, rows.seed, rows.schedule, rows.shape), noiseless)
        shared = self.prefix.steps(rows.ids, rows.actions, version)
        if shared:

            def step(x: Tensor, i: int, features: Features) -> Tensor:
                if i == 0:
                    noiseless.forget()  # another batch of groups begins
                return noiseless(x, self._velocity(rows, x, i, features), i)

            key = (rows.seed, version)
            state.x, state.finite = self.prefix(state.x, rows.slots, rows.ids, shared, key, step, self.batch_features)
            noiseless.forget()  # the window begins with noise
        return state, shared

    def _denoise(self, rows: _Rows, state: _State, first: int, last: int) -> None:
        """The steps [``first``, ``last``). Raises ``NotFiniteError``."""
        for i in range(first, last):
            velocity, state.velocity = state.velocity, None
            if velocity is None:
                velocity = self._velocity(rows, state.x, i, rows.features)
            noisy = i in rows.actions
            mean = sde.step_mean(state.x, velocity, rows.c, i) if noisy else state.noiseless(state.x, velocity, i)
            state.finite.append(mean.flatten(1).isfinite().all(1))
            if not noisy:
                state.x = mean
                continue
            state.noiseless.forget()
            if not state.states:
                state.states.append(state.x)
            z = self.noise(rows.ids, f"step{i}", rows.seed, rows.shape)
            state.x = mean + rows.c.std[i].item() * z
            state.states.append(state.x)
            state.log_probs.append(sde.log_prob(state.x, mean, rows.c, i))
        finite.check_steps(state.finite, rows.ids)

    def _noiseless(self, rows: _Rows) -> NoiselessSteps:
        return NoiselessSteps(rows.c, rows.solver)

    def _velocity(self, rows: _Rows, x: Tensor, i: int, features: Features) -> Tensor:
        with nullcontext() if i < rows.tuned else self.policy.disable_adapter():  # type: ignore[operator]
            return self.velocity(x, rows.schedule.timesteps[i].expand(len(x)), features)

    def _made(self, rows: _Rows, state: _State, clean: Tensor) -> DenoisingRows:
        recorded = bool(state.states)
        return DenoisingRows(
            slots=list(rows.slots),
            ids=list(rows.ids),
            clean=clean,
            states=torch.stack(state.states, 1) if recorded else None,
            actions=torch.tensor(list(rows.actions)[: len(state.log_probs)]) if recorded else None,
            log_probs=torch.stack(state.log_probs, 1) if recorded else None,
        )
