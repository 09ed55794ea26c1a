"""SFT on given pictures or clips: the denoising loss that the model was trained with, at freshly drawn noise levels.

    L = mean over pictures of w(s) mean (p(x_s) - p*)^2,   x_s = (1 - s) x0 + s eps

``p`` is what the model predicts: the velocity, with the target ``p* = eps - x0`` (flow matching, Lipman et al. 2022,
arXiv 2210.02747); or the noise, ``p* = eps``; or ``a eps - b x0`` where the checkpoint says ``v_prediction``.

Levels are those of the family's training timesteps, with the checkpoint's shift. Flow models draw them by ``density``
(Esser et al. 2024, arXiv 2403.03206, section 3.1), models that predict noise evenly. Names and defaults are those of
diffusers' training scripts (``--weighting_scheme``).

Departs: latents are the mode of the VAE's distribution, encoded once; the scripts draw from it. The script for Stable
Diffusion 3 multiplies the error by ``s^2`` (``--precondition_outputs 1``); here it is as with 0, and as in those for
FLUX. A shift that grows with the picture is not used for training, as in the scripts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from mmrl.algorithms.objective import Loss, OfflineObjective
from mmrl.config.algorithm_settings import GivenPictureSettings, TrainsOn


class PictureSFTSettings(GivenPictureSettings):
    """Supervised fine-tuning on given pictures or clips with captions."""

    trains_on: ClassVar[TrainsOn] = "given_pictures"
    density: Literal["auto", "uniform", "logit_normal", "mode"] = "auto"
    """How often each noise level trains. ``auto``: ``logit_normal`` for flow models. Models that predict noise take
    their timesteps evenly, which is ``uniform``."""
    logit_mean: float = 0.0
    """Mean of ``logit_normal``; above 0 there is less noise."""
    logit_std: PositiveFloat = 1.0
    """Standard deviation of ``logit_normal``."""
    mode_scale: float = 1.29
    """Scale of ``mode``; above 0 the middle levels come more often."""
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    """Weight of the error at noise level s: 1, ``s^-2``, or ``2 / (pi (1 - 2 s + 2 s^2))``."""

    def place(self, draw: torch.Generator, *, flow: bool) -> float:
        """A place in [0, 1) of the training timesteps, 0 the noisiest. ``flow``: whether the model predicts a
        velocity."""
        density = ("logit_normal" if flow else "uniform") if self.density == "auto" else self.density
        if density == "logit_normal":
            normal = torch.randn((), generator=draw, dtype=torch.float64)
            u = (self.logit_mean + self.logit_std * normal).sigmoid().item()
        else:
            u = torch.rand((), generator=draw, dtype=torch.float64).item()
            if density == "mode":
                u = 1 - u - self.mode_scale * (math.cos(math.pi / 2 * u) ** 2 - 1 + u)
        return min(max(u, 0.0), 1 - 1e-9)


class PictureSFT(OfflineObjective):
    """Final class; see ``mmrl.algorithms.objective.Offline``. ``B`` is a number of pictures."""

    needs = frozenset({"picture_error", "sigma"})

    def __init__(self, settings: PictureSFTSettings) -> None:
        self.settings = settings

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """``new``: picture_error ``[B]``, the squared error of the model's own prediction as a mean over dimensions,
        and sigma ``[B]``; ``old``: weights ``[B]`` (0 leaves a picture out). ``sft/fit`` is minus the loss."""
        losses = new["picture_error"] * self._weight(new["sigma"]) * old["weights"]
        value = losses.sum()
        return Loss(value / total, sums={"policy/loss": value.detach(), "sft/fit": -value.detach()}, maxima={})

    def _weight(self, sigma: Tensor) -> Tensor:
        match self.settings.weighting:
            case "sigma_sqrt":
                return sigma**-2
            case "cosmap":
                return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
            case "none":
                return torch.ones_like(sigma)
