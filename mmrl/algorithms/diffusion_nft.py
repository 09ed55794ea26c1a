"""DiffusionNFT: online RL on the forward process (Zheng et al. 2025, arXiv 2509.16117, eq. 9).

No SDE, no log-probs: clean samples of the old policy are noised afresh, and the velocity is pulled toward
(away from) them by an implicit positive (negative) policy:

    v+ = beta v + (1 - beta) v_old,   v- = (1 + beta) v_old - beta v,   r = clip(A / A_max, -1, 1) / 2 + 1/2
    L  = A_max [ r |x0+ - x0|^2 / w+ + (1 - r) |x0- - x0|^2 / w- ] / beta + kl |v - v_ref|^2

with ``x0+- = x_s - s v+-`` and ``w+- = mean |x0+- - x0|`` (no gradient, at least 1e-5), as in the authors' code.

Departs: samples come from Euler's ODE steps; the authors use a second-order solver, which is ``sampling.solver:
dpmsolver++`` here.

``v_old`` must be the velocity of the policy that drew the samples: the paper's theorem splits this velocity into those
of a positive and a negative policy over the samples. So when samples are drawn ahead (``placement: disaggregated``),
``v_old`` uses the old policy's weights from the time of sampling, and no importance weight is needed. This departs from
the paper, where the current old policy samples: the trained policy is ``staleness`` steps further from the policy it is
compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.forward_process import ForwardObjective
from mmrl.algorithms.sde import squared_distance
from mmrl.config.algorithm_settings import ForwardSettings, PictureSettings
from mmrl.config.section import Fraction, NonNegative


class DiffusionNFTSettings(ForwardSettings, PictureSettings):
    """Forward-process optimisation (Zheng et al. 2025, arXiv 2509.16117)."""

    takes_older_samples: ClassVar[bool] = True
    beta: PositiveFloat = 1.0
    """How far the two trained velocities lie from the old policy's, as a factor of the policy's change."""
    kl_coef: NonNegative = 1e-4
    """Weight of the squared distance to the reference's velocity."""
    old_decay_rate: NonNegative = 0.001
    """Growth of d in ``old_decay_max`` per step."""
    old_decay_max: Fraction = 0.5
    """After step n the old policy becomes d * old + (1 - d) * policy, d = min(rate * n, max)."""
    last_level: bool = True
    """Train on all noise levels of the rollout, the last one included; false leaves the last one out."""

    def levels(self, steps: int) -> list[int]:
        return list(range(steps)) if self.last_level else super().levels(steps)


class DiffusionNFT(ForwardObjective):
    """Final class; see ``mmrl.algorithms.objective.ForwardProcess``."""

    def __init__(self, settings: DiffusionNFTSettings) -> None:
        super().__init__(settings.noise_levels, settings.kl_coef, frozenset({"v", "v_old"}))
        self.beta, self.advantage_clip = settings.beta, settings.advantage_clip
        self.advantage_std = settings.advantage_std
        self.copies = {"old": lambda n: min(settings.old_decay_rate * n, settings.old_decay_max)}

    def samples_with(self, step: int) -> str:
        return "old"

    def losses(
        self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        loss, r = nft_loss(
            new["v"],
            new["v_old"],
            new["x_s"],
            new["x0"],
            new["sigma"],
            old["advantages"],
            self.beta,
            self.advantage_clip,
        )
        return loss, {"policy/optimality": r, "policy/v_change": squared_distance(new["v"], new["v_old"])}, {}


def nft_loss(
    v: Tensor, v_old: Tensor, x_s: Tensor, x0: Tensor, sigma: Tensor, advantages: Tensor, beta: float, clip: float
) -> tuple[Tensor, Tensor]:
    """The loss without its KL term and the optimality probability ``r``, each ``[B]``."""
    s = sigma.view(-1, *[1] * (x0.ndim - 1))
    r = (advantages.clamp(-clip, clip) / clip / 2 + 0.5).clamp(0, 1)
    positive = x_s - s * (beta * v + (1 - beta) * v_old)
    negative = x_s - s * ((1 + beta) * v_old - beta * v)
    with torch.no_grad():
        w_positive, w_negative = (
            (guess.double() - x0.double()).abs().flatten(1).mean(1).clamp(min=1e-5).float()
            for guess in (positive, negative)
        )
    pull = r * squared_distance(positive, x0) / w_positive
    push = (1 - r) * squared_distance(negative, x0) / w_negative
    return clip * (pull + push) / beta, r
