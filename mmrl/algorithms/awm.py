"""AWM: a policy gradient whose log-prob is the weighted matching error (Xue et al. 2025, arXiv 2509.25050).

    log p = -w(l, t),   l = mean (v - (eps - x0))^2,   r = exp(log p - log p_old) on the same eps and t
    L = max(-A r, -A clip(r)) + kl_coef mean (v - v_ref)^2 + average_coef mean (v - v_average)^2

``w`` is l, t l, t^2 l, t (sqrt(l + 1e-10) - 1e-5) (huber) or t ((l + 1e-10)^p - 1e-10^p) / p (ghuber). ``old`` is the
policy at the start of the step, which sampled; A is clipped to advantage_clip and divided by it.

Departs: noise levels are drawn from the sampling steps' own, with pure noise; the authors leave it out and space them.
Samples come from the plain ODE, theirs from an SA-solver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from mmrl.algorithms.forward_process import ForwardObjective
from mmrl.algorithms.policy_gradient import clipped_surrogate
from mmrl.algorithms.sde import squared_distance
from mmrl.config.algorithm_settings import ForwardSettings, PictureSettings
from mmrl.config.section import Fraction, NonNegative

_EPSILON = 1e-10


class AWMSettings(ForwardSettings, PictureSettings):
    """Advantage weighted matching (Xue et al. 2025, arXiv 2509.25050)."""

    noise_levels: PositiveInt | None = 6
    """Noise levels trained per sample; None takes every rollout step but the last."""
    clip_range: PositiveFloat = 1.0
    """The ratio to the old policy is clipped to between 1 - clip_range and 1 + clip_range."""
    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = "ghuber"
    """Weight of the matching error by its noise level t: 1, t, t squared, or t times a root of the error."""
    ghuber_power: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Power of the error in ``weighting: ghuber``."""
    kl_coef: NonNegative = 0.003
    """Weight of the squared distance to the reference's velocity."""
    average_coef: NonNegative = 1.0
    """Weight of the squared distance to the velocity of a moving average of the policy; 0 keeps no average."""
    average_decay_rate: NonNegative = 0.001
    """Growth of d in ``average_decay_max`` per step."""
    average_decay_max: Fraction = 0.3
    """After step n the average becomes d * average + (1 - d) * policy, d = min(rate * n, max)."""


class AWM(ForwardObjective):
    """Final class; see ``mmrl.algorithms.objective.ForwardProcess``."""

    def __init__(self, settings: AWMSettings) -> None:
        average = {"v_average"} if settings.average_coef else set()
        super().__init__(settings.noise_levels, settings.kl_coef, frozenset({"v", "v_old", "target"} | average))
        self.clip_range, self.advantage_clip = settings.clip_range, settings.advantage_clip
        self.advantage_std = settings.advantage_std
        self.weighting, self.power = settings.weighting, settings.ghuber_power
        self.average_coef = settings.average_coef
        old: dict[str, Callable[[int], float]] = {"old": lambda _: 0.0}
        slow = {"average": lambda n: min(settings.average_decay_rate * n, settings.average_decay_max)}
        self.copies = old | (slow if average else {})

    def losses(
        self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        error, error_old = (squared_distance(new[name], new["target"]) for name in ("v", "v_old"))
        log_prob, log_prob_old = (
            -weighted_error(e, new["sigma"], self.weighting, self.power) for e in (error, error_old)
        )
        advantages = old["advantages"].clamp(-self.advantage_clip, self.advantage_clip) / self.advantage_clip
        clipped = clipped_surrogate(log_prob - log_prob_old, advantages, self.clip_range, self.clip_range)
        deviation = (clipped.ratio - 1).abs()
        sums = {
            "policy/ratio": clipped.ratio,
            "policy/clip_fraction": (deviation > self.clip_range).float(),
            "policy/matching": error,
        }
        loss = clipped.loss
        if self.average_coef:
            sums["policy/average_distance"] = squared_distance(new["v"], new["v_average"])
            loss = loss + self.average_coef * sums["policy/average_distance"]
        return loss, sums, {"policy/ratio_max_dev": deviation}


def weighted_error(error: Tensor, t: Tensor, weighting: str, power: float) -> Tensor:
    """The matching error ``[B]`` as AWM weighs it at noise levels ``t`` ``[B]``, float64."""
    error, t = error.double(), t.double()
    match weighting:
        case "uniform":
            return error
        case "t":
            return error * t
        case "t2":
            return error * t.square()
        case "huber":
            return ((error + _EPSILON).sqrt() - _EPSILON**0.5) * t
        case _:
            return ((error + _EPSILON) ** power - _EPSILON**power) * t / power
