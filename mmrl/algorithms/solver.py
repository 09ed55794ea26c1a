"""Denoising steps without noise: Euler's, or those of DPM-Solver++ of second order.

In the notation of ``sde.py``, with ``l = log((1 - s) / s)`` and the prediction ``x0 = x - s v`` of a step, the
multistep form of DPM-Solver++ (2M, arXiv 2211.01095, algorithm 2 in its midpoint form) extrapolates the predictions of
this step and of the one before it:

    D = x0 + (h / (2 h_before)) (x0 - x0_before),   h = l' - l
    x' = (s' / s) x + ((1 - s') - (1 - s) s' / s) D

With ``D = x0`` this is Euler's step, so it is Euler's step and a correction ``k (x0 - x0_before)``, where ``k`` depends
on the schedule alone. ``k`` is 0 where ``h`` or ``h_before`` is infinite: in the step from pure noise, in the one after
it, and in the one to sigma 0. A step costs one call of the model, as Euler's. The first step after one with noise is
Euler's: the predictions before the noise are of another path.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.algorithms import sde

Solver = Literal["euler", "dpmsolver++"]
LOWER_FINAL = 15
"""With fewer steps the last one is Euler's, as diffusers' ``lower_order_final`` has it."""


def corrections(sigmas: Tensor) -> Tensor:
    """The factor ``k`` of every step of ``sigmas`` ``[T + 1]`` (falling), ``[T]`` float64; 0 for the first step."""
    s = sigmas.double()
    log_ratio = torch.log1p(-s) - torch.log(s)
    h = log_ratio.diff()
    ratio = torch.cat([torch.zeros(1, dtype=h.dtype), h[1:] / (2 * h[:-1])])
    usable = ratio.isfinite() & h.isfinite()
    usable[-1] &= len(h) >= LOWER_FINAL
    gain = (1 - s[1:]) - (1 - s[:-1]) * s[1:] / s[:-1]
    return torch.where(usable, gain * ratio.nan_to_num(0, 0, 0), torch.zeros_like(gain))


class NoiselessSteps:
    """Final class. The steps without noise of a micro-batch; it remembers the last prediction."""

    def __init__(self, c: sde.Coefficients, solver: Solver) -> None:
        self._c = c
        self._corrections = corrections(c.sigmas) if solver == "dpmsolver++" else None
        self.before: Tensor | None = None
        """The clean result that the step before predicted, ``[B, ...]``; None for Euler and after noise."""

    def __call__(self, x: Tensor, v: Tensor, step: int) -> Tensor:
        """The next state, float32, of ``x`` ``[B, ...]`` and the velocity there."""
        after = sde.step_mean(x, v, self._c, step)
        if self._corrections is None:
            return after
        clean = x.float() - self._c.sigmas[step].item() * v.float()
        if self.before is not None:
            after = after + self._corrections[step].item() * (clean - self.before)
        self.before = clean
        return after

    def forget(self) -> None:
        """Begin anew with Euler's step."""
        self.before = None
