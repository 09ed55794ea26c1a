"""One denoising step as a Gaussian action: Flow-SDE, CPS, DanceGRPO's, Wan's and DDIM's noise, and the plain ODE.

Notation: ``x_s = (1 - s) x0 + s eps``, the network predicts ``v = eps - x0``, a step goes from ``s`` to ``s' < s`` and
``dt = s' - s < 0``. Every kind is linear in ``x`` and ``v``, so its coefficients depend on the schedule alone and are
computed once in float64:

    mean = c_x x + c_v v,     x' = mean + std z

- flow   d = a sqrt(s / (1 - s)), std = d sqrt(-dt)            (Flow-GRPO, arXiv 2505.05470, eq. 9)
- dance  d = eta, the same drift                               (DanceGRPO, arXiv 2505.07818)
- linear d = a (s_last + (s_second - s_last) s), the same drift (Flow-GRPO's and Flash-GRPO's code for Wan 2.1, a = 1)
- cps    std = s' sin(a pi / 2), total noise level stays s'    (arXiv 2509.05952)
- ddim   std = eta n' sqrt((b'^2 / b^2) (1 - a^2 / a'^2)), total noise level stays s'   (DDIM, arXiv 2010.02502, eq. 16)
- ode    std = 0

DDIM's ``a``, ``b`` and ``n`` are those of a state of unit variance, ``a x0 + b eps`` with ``a^2 + b^2 = 1``, and
``x_s`` is ``n`` times that state: ``a = (1 - s) / n``, ``b = s / n``, ``n = sqrt((1 - s)^2 + s^2)``. With eta 1 it is
the policy of DDPO (arXiv 2305.13301). Log-probs are of ``x_s``; DDPO's, of the other state, differ by the constant
``log n'``, which cancels in every ratio.

``s_second`` and ``s_last`` are sigmas of the schedule. Where ``s = 1``, within 0.001, the flow's ``1 - s`` takes the
schedule's second sigma, as the paper's code does. Log-probs are the *mean* over the non-batch dimensions; CPS leaves
out ``1 / (2 std^2)`` and the constants, as its authors do, so its clip range is on another scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["flow", "cps", "dance", "linear", "ddim"]


@dataclass(frozen=True)
class Coefficients:
    """Per-step constants of a schedule, each ``[T]`` float32 on the CPU; ``sigmas`` is ``[T + 1]``."""

    kind: Kind
    sigmas: Tensor
    c_x: Tensor
    c_v: Tensor
    std: Tensor
    dt: Tensor

    @property
    def kl_std(self) -> Tensor:
        """What the authors of each noise divide the distance of two means by for their KL term, ``[T]``: ``std``, which
        is the KL of the two Gaussians; Flow-GRPO ``d``, so without the step's ``dt``."""
        return self.std / (-self.dt).sqrt() if self.kind in ("flow", "dance") else self.std


def coefficients(sigmas: Tensor, kind: Kind, noise_level: float, noisy: Sequence[int]) -> Coefficients:
    """Constants of every step of ``sigmas`` ``[T + 1]`` (falling to 0): noise at the steps ``noisy``, ODE elsewhere.

    Raises ``ValueError`` for a step in ``noisy`` that does not exist or cannot carry noise (the final one).
    """
    s, s2 = sigmas[:-1].double(), sigmas[1:].double()
    dt = s2 - s
    c_x, c_v, std = torch.ones_like(s), dt.clone(), torch.zeros_like(s)
    outside = [i for i in noisy if not 0 <= i < len(s) or s2[i] <= 0]
    if outside:
        raise ValueError(f"steps {outside} of {len(s)} cannot carry noise: the last step ends at sigma 0")
    i = torch.tensor(sorted(noisy), dtype=torch.long)
    if kind in ("cps", "ddim"):
        std[i] = (s2 * math.sin(noise_level * math.pi / 2) if kind == "cps" else noise_level * _ddim_std(s, s2))[i]
        kept = (s2[i] ** 2 - std[i] ** 2).clamp(min=0).sqrt()
        c_x[i] = (1 - s2[i]) + kept
        c_v[i] = kept * (1 - s[i]) - (1 - s2[i]) * s[i]
    else:
        d = (
            noise_level
            * {
                "flow": (s / (1 - torch.where(s > 0.999, s2[0], s))).sqrt(),
                "linear": s2[-1] + (s2[0] - s2[-1]) * s,
                "dance": torch.ones_like(s),
            }[kind][i]
        )
        std[i] = d * (-dt[i]).sqrt()
        c_x[i] = 1 + d**2 / (2 * s[i]) * dt[i]
        c_v[i] = (1 + d**2 * (1 - s[i]) / (2 * s[i])) * dt[i]
    return Coefficients(kind, sigmas.float(), c_x.float(), c_v.float(), std.float(), dt.float())


def _ddim_std(s: Tensor, s2: Tensor) -> Tensor:
    """With eta 1, in flow coordinates."""
    n, n2 = (((1 - t) ** 2 + t**2).sqrt() for t in (s, s2))
    a, b, a2, b2 = (1 - s) / n, s / n, (1 - s2) / n2, s2 / n2
    return n2 * (b2 / b * (1 - (a / a2) ** 2).clamp(min=0).sqrt())


def noiseless(sigmas: Tensor, kind: Kind, steps: Sequence[int]) -> list[int]:
    """Those of ``steps`` in which ``ddim`` adds almost no noise: they end below sigma 0.01.

    Schedules of flow models reach 0.001 before 0. The gradient of a log-prob grows with 1 / std, so that such a step
    would dominate all others.
    """
    return [i for i in steps if kind == "ddim" and sigmas[i + 1] < 0.01]


def step_mean(x: Tensor, v: Tensor, c: Coefficients, step: int) -> Tensor:
    """Mean of the next state, float32, the shape of ``x`` ``[B, ...]``."""
    return c.c_x[step].item() * x.float() + c.c_v[step].item() * v.float()


def log_prob(following: Tensor, mean: Tensor, c: Coefficients, step: int) -> Tensor:
    """Log-probability ``[B]`` of ``following`` given ``mean``, averaged over the non-batch dimensions."""
    distance = squared_distance(following.detach(), mean)
    if c.kind == "cps":
        return -distance
    std = c.std[step].item()
    return -distance / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared difference over the non-batch dimensions, ``[B]`` float32."""
    return (a.float() - b.float()).square().flatten(1).mean(1)
