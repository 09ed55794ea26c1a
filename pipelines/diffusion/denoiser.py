"""The sampling of a diffusion pipeline, at once or in two parts.

In two parts (``midway``) more samples are begun than are trained on. ``begin`` denoises a micro-batch to the step at
which it is judged and predicts the clean results there, as ``x0 = x - s v``. ``finish`` denoises those samples to the
end that were kept. The velocity ``v`` of the prediction is that of the next step, which does not compute it again.

The samples of a group may share denoising steps: those before the window, from one initial noise. They carry no noise,
so that all samples of a group have the same latents until the window begins (``sampling.same_initial_noise``, as
DanceGRPO and the ``same_latent`` of Flow-GRPO-Fast). They are computed once for a group. The latents before the window
are those of computing them for every sample: equal to the bit if samples are drawn one at a time, else within the
rounding of another batch shape (in float32 1e-6 of the largest value, times the scale of guidance). No update
recomputes these steps, so the first ratio is still exactly 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmrl.algorithms import sde
from mmrl.algorithms.solver import NoiselessSteps, Solver
from mmrl.config.sampling import shares_steps
from mmrl.config.schema import Recipe
from mmrl.core import nan_check
from mmrl.core.trajectory import DenoisingRows, SampleId, Slot
from mmrl.core.transfer import picked

from .adapter import Adapter, Schedule
from .predictor import Predictor

Features = dict[str, Tensor]
Step = Callable[[Tensor, int, Features], Tensor]
"""The latents after a denoising step, of those before it, its number, and the features of the prompts."""
_Group = tuple[int, int, int]
"""Step, slot and attempt."""


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
        self.predicted: list[Tensor] = []
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
        return self._sampled(self._rows(slots, ids, actions, seed, evaluate=evaluate), version)

    @torch.no_grad()
    def draft(self, slots: Sequence[Slot], ids: Sequence[SampleId], seed: int, steps: int) -> DenoisingRows:
        return self._sampled(self._rows(slots, ids, [], seed, draft=steps), None)

    def _sampled(self, rows: _Rows, version: tuple[int, str] | None) -> DenoisingRows:
        """All steps."""
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
        nan_check.check_steps([*state.finite, predicted.flatten(1).isfinite().all(1)], ids)
        made = self._made(rows, state, predicted)
        before = state.noiseless.before
        made.paused = torch.stack([state.x, velocity, *([] if before is None else [before])], 1)
        return made

    @torch.no_grad()
    def finish(self, begun: DenoisingRows, actions: Sequence[int], seed: int, at: int) -> DenoisingRows:
        assert begun.paused is not None
        rows = self._rows(begun.slots, begun.ids, actions, seed)
        latents, velocity, *before = begun.paused.unbind(1)
        state = _State(latents, NoiselessSteps(rows.c, rows.solver))
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
        draft: int | None = None,
    ) -> _Rows:
        recipe = self.recipe
        solver = (recipe.eval.solver if evaluate else None) or recipe.denoising.solver
        schedule = self.sizes.adapted(slots).schedule(recipe.eval.steps if evaluate else draft)
        steps, shape = len(schedule.timesteps), self.sizes.shape(slots)
        features, c = self.batch_features(slots), self.coefficients(schedule, actions)
        tuned = round(recipe.eval.tuned_fraction * steps) if evaluate else steps
        return _Rows(slots, ids, actions, seed, schedule, shape, features, c, steps, tuned, solver)

    def _started(self, rows: _Rows, version: tuple[int, str] | None) -> tuple[_State, int]:
        """The initial noise, or the latents after the steps that the samples of a group share; and the next step."""
        noiseless = NoiselessSteps(rows.c, rows.solver)
        noise = self.initial(rows.ids, rows.seed, rows.schedule, rows.shape)
        state = _State(self.adapter.started(noise, rows.features, rows.schedule.start), noiseless)
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
            if self.recipe.algorithm.scores_steps:
                clean = state.x - rows.schedule.sigmas[i].item() * velocity
                state.predicted.append(self.adapter.whole(clean, rows.features))
            z = self.noise(rows.ids, f"step{i}", rows.seed, rows.shape)
            state.x = mean + rows.c.std[i].item() * z
            state.states.append(state.x)
            state.log_probs.append(sde.log_prob(self.counted(state.x), self.counted(mean), rows.c, i))
        nan_check.check_steps(state.finite, rows.ids)

    def _velocity(self, rows: _Rows, x: Tensor, i: int, features: Features) -> Tensor:
        with nullcontext() if i < rows.tuned else self.policy.disable_adapter():  # type: ignore[operator]
            return self.velocity(x, rows.schedule.timesteps[i].expand(len(x)), features)

    def _made(self, rows: _Rows, state: _State, clean: Tensor) -> DenoisingRows:
        recorded = bool(state.states)
        return DenoisingRows(
            slots=list(rows.slots),
            ids=list(rows.ids),
            clean=self.adapter.whole(clean, rows.features),
            states=torch.stack(state.states, 1) if recorded else None,
            actions=torch.tensor(list(rows.actions)[: len(state.log_probs)]) if recorded else None,
            log_probs=torch.stack(state.log_probs, 1) if recorded else None,
            predicted=torch.stack(state.predicted, 1) if state.predicted else None,
        )


class _Begun(NamedTuple):
    x: Tensor
    """Latents of one sample before the window."""
    finite: Tensor
    """Whether they were finite after each step, ``[first]`` bool."""


class SharedPrefix:
    """Final class. The steps before the window of a pipeline's samples.

    Groups that are whole in a call are computed in one batch. A group that is divided over several calls is computed by
    itself and kept for the next call. Its latents are therefore equal to the bit in every call, on every device.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._size = recipe.begun_per_prompt
        self.used = shares_steps(recipe.sampling, self._size)
        self.saved = 0
        """Denoising steps of single samples that were not computed, since the run began."""
        self._kept: dict[_Group, _Begun] = {}
        self._kept_for: object = None

    def steps(self, ids: Sequence[SampleId], actions: Sequence[int], version: tuple[int, str] | None) -> int:
        """How many steps of these samples can be shared; 0 if no sample shares them with another."""
        if not self.used or not actions or (version is None and len(set(map(_group, ids))) == len(ids)):
            return 0
        return min(actions)

    def __call__(
        self,
        x: Tensor,
        slots: Sequence[Slot],
        ids: Sequence[SampleId],
        steps: int,
        of: tuple[int, tuple[int, str] | None],
        denoise: Step,
        features: Callable[[Sequence[Slot]], Features],
    ) -> tuple[Tensor, list[Tensor]]:
        """The latents after the first ``steps`` steps, ``[B, ...]``, and whether each sample's were finite after each
        of these steps, ``[B]`` bool each.

        ``x``: the initial noise ``[B, ...]``. ``of``: the run's seed and the version of the weights; without a version
        nothing is taken from an earlier call. ``features``: what ``denoise`` reads of these slots' prompts.
        """
        groups = [_group(i) for i in ids]
        rows = {group: [n for n, other in enumerate(groups) if other == group] for group in groups}
        whole = [group for group in rows if len(rows[group]) >= self._size]
        cut = [group for group in rows if len(rows[group]) < self._size]
        known = self._kept if of[1] is not None and self._kept_for == (steps, *of) else {}
        begun = {group: known[group] for group in cut if group in known}
        computed = len(rows) - len(begun)
        for together in (whole, *([group] for group in cut if group not in begun)):
            if together:
                first = [rows[group][0] for group in together]
                made = _begin(picked(x, first), steps, denoise, features([slots[n] for n in first]))
                begun |= dict(zip(together, made, strict=True))
        self._kept, self._kept_for = {group: begun[group] for group in cut}, (steps, *of)
        self.saved += steps * (len(ids) - computed)
        finite = torch.stack([begun[group].finite for group in groups], 1)
        return torch.stack([begun[group].x for group in groups]), list(finite)

    def forget(self) -> None:
        """Keep nothing for the next call: the weights change."""
        self._kept = {}


def _begin(x: Tensor, steps: int, denoise: Step, features: Features) -> list[_Begun]:
    finite: list[Tensor] = []
    for i in range(steps):
        x = denoise(x, i, features)
        finite.append(x.flatten(1).isfinite().all(1))
    return [_Begun(*one) for one in zip(x, torch.stack(finite, 1), strict=True)]


def _group(name: SampleId) -> _Group:
    return name.step, name.slot, name.attempt
