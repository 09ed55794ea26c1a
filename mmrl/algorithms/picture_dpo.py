"""Diffusion-DPO on given pairs of pictures (Wallace et al. 2023, arXiv 2311.12908, eq. 14).

    h = -beta / 2 [(l_w - l_w,ref) - (l_l - l_l,ref)],   l = mean (v(x_s) - (eps - x0))^2,   x_s = (1 - s) x0 + s eps
    L = -log sigmoid(h)

Both pictures of a pair get the same noise, at one level that is drawn anew in every step. ``diffusion_dpo`` makes pairs
from the run's own samples.

Departs: the matching error is that of the velocity, as a mean over dimensions, which beta multiplies; levels are those
of ``sampling.steps``, not all 1,000; latents are the mode of the VAE's distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import logsigmoid

from mmrl.algorithms.pairs import PairObjective
from mmrl.config.algorithm_settings import GivenPictureSettings, TrainsOn


class PictureDPOSettings(GivenPictureSettings):
    """Diffusion-DPO on given pairs of pictures (Wallace et al. 2023, arXiv 2311.12908)."""

    trains_on: ClassVar[TrainsOn] = "picture_pairs"
    beta: PositiveFloat = 2000.0
    """How strongly the reference holds the policy; larger stays nearer."""


class PictureDPO(PairObjective):
    """Final class; see ``mmrl.algorithms.objective.Offline``."""

    needs = frozenset({"chosen_error", "rejected_error", "reference_chosen_error", "reference_rejected_error"})

    def __init__(self, settings: PictureDPOSettings) -> None:
        self.beta = settings.beta

    def pair_loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """``new``: chosen_error and rejected_error ``[B]``, and the same of the reference."""
        chosen, rejected = (
            -self.beta / 2 * (new[f"{name}_error"] - new[f"reference_{name}_error"]) for name in ("chosen", "rejected")
        )
        return -logsigmoid(chosen - rejected), {
            "dpo/accuracy": (chosen > rejected).float(),
            "dpo/margin": chosen - rejected,
            "dpo/chosen_reward": chosen,
            "dpo/rejected_reward": rejected,
        }
