"""Denoising steps that the samples of a group share: those before the window, from one initial noise.

They carry no noise, so that all samples of a group have the same latents until the window begins
(``sampling.same_initial_noise``, as DanceGRPO and the ``same_latent`` of Flow-GRPO-Fast). They are computed once for a
group. The latents before the window are those of computing them for every sample: equal to the bit if samples are drawn
one at a time, else within the rounding of another batch shape (in float32 1e-6 of the largest value, times the scale of
guidance). No update recomputes these steps, so the first ratio is still exactly 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl.config.sampling import shares_steps
from mmrl.config.schema import Recipe
from mmrl.trajectory import SampleId, Slot
from mmrl.transfer import picked

Features = dict[str, Tensor]
Step = Callable[[Tensor, int, Features], Tensor]
"""The latents after a denoising step, of those before it, its number, and the features of the prompts."""
_Group = tuple[int, int, int]
"""Step, slot and attempt."""


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
