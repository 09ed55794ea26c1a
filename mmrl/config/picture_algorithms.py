"""The sections of the algorithms for pictures: the defaults are the settings of each one's paper. Imports no torch."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from mmrl.config.section import (
    AdvantageAggregation,
    AlgorithmSection,
    Decay,
    Fraction,
    Kind,
    NonNegative,
    Spread,
    TrainsOn,
)


class PictureAlgorithm(AlgorithmSection):
    """What the algorithms share that weigh a picture by its group's rewards (abstract)."""

    advantage_clip: PositiveFloat = 5.0
    advantage_std: Spread = "batch"
    """Divide the centred reward by the group's standard deviation or by the batch's (Flow-GRPO's default)."""
    advantage_aggregation: AdvantageAggregation = "sum"


class StepAlgorithm(PictureAlgorithm):
    """A policy gradient over denoising steps (abstract)."""

    kl_coef: NonNegative = 0.04
    trained_steps: PositiveInt | None = None
    """Train so many of the recorded steps, drawn anew in every training step (DanceGRPO: 60 % of them); None trains
    all."""


class FlowGRPO(StepAlgorithm):
    """Clipped policy gradient over denoising steps (Liu et al. 2025, arXiv 2505.05470)."""

    type: Literal["flow_grpo"] = "flow_grpo"
    clip_range: PositiveFloat = 1e-4
    step_weight: Literal["none", "tempflow", "flash"] = "none"
    """A step's loss is multiplied by 2.25 std, its noise (TempFlow-GRPO, arXiv 2508.04324), or by std / |c_v|, which
    makes all steps' gradients alike, over its mean (Flash-GRPO, arXiv 2605.15980)."""


class GRPOGuard(StepAlgorithm):
    """Flow-GRPO with ratios of one scale at every step (Wang et al. 2025, arXiv 2510.22319)."""

    type: Literal["grpo_guard"] = "grpo_guard"
    clip_range: PositiveFloat = 2e-6
    kl_coef: NonNegative = 0.0


class FlowDPPO(StepAlgorithm):
    """No clip: a step that has moved too far and would move further is left out (Flow-DPPO)."""

    type: Literal["flow_dppo"] = "flow_dppo"
    max_divergence: PositiveFloat = 1e-5
    """KL divergence of a step's Gaussian from that of the policy that sampled, mean per latent dimension."""
    kl_coef: NonNegative = 0.0


class ForwardAlgorithm(AlgorithmSection):
    """Clean samples noised afresh (abstract)."""

    kind: ClassVar[Kind] = "forward_process"
    guidance: NonNegative | Literal["sampling"] = 1.0
    """Guidance scale of the predictions in the loss. 1 (or less) predicts with the prompt alone, as the authors do;
    ``sampling`` takes sampling.guidance_scale (Flow-Factory's and verl-omni's DiffusionNFT)."""
    noise_levels: PositiveInt | None = None
    """Noise levels trained per sample; None takes every rollout step but the last."""

    def loss_guidance(self, sampling: float) -> float:
        return sampling if self.guidance == "sampling" else self.guidance

    def levels(self, steps: int) -> list[int]:
        """Which of the noise levels of a rollout's ``steps`` may train: all but the last."""
        return list(range(steps - 1))


class DiffusionNFT(ForwardAlgorithm, PictureAlgorithm):
    """Forward-process optimisation (Zheng et al. 2025, arXiv 2509.16117)."""

    type: Literal["diffusion_nft"] = "diffusion_nft"
    beta: PositiveFloat = 1.0
    kl_coef: NonNegative = 1e-4
    """Weight of the squared distance to the reference's velocity."""
    old_decay_rate: NonNegative = 0.001
    old_decay_max: Fraction = 0.5
    """After step n the old policy becomes d * old + (1 - d) * policy, d = min(rate * n, max)."""
    last_level: bool = True
    """Levels are drawn among all of the rollout, the last too; false leaves that one out."""

    def levels(self, steps: int) -> list[int]:
        return list(range(steps)) if self.last_level else super().levels(steps)


class AWM(ForwardAlgorithm, PictureAlgorithm):
    """Advantage weighted matching (Xue et al. 2025, arXiv 2509.25050)."""

    type: Literal["awm"] = "awm"
    noise_levels: PositiveInt | None = 6
    """Noise levels trained per sample; None takes every rollout step but the last."""
    clip_range: PositiveFloat = 1.0
    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = "ghuber"
    """Of the matching error by its noise level t: 1, t, t squared, or a root of it times t."""
    ghuber_power: Annotated[float, Field(gt=0, le=1)] = 0.25
    kl_coef: NonNegative = 0.003
    """Weight of the squared distance to the reference's velocity."""
    average_coef: NonNegative = 1.0
    """Weight of the squared distance to the velocity of a moving average of the policy; 0 keeps none."""
    average_decay_rate: NonNegative = 0.001
    average_decay_max: Fraction = 0.3
    """After step n the average becomes d * average + (1 - d) * policy, d = min(rate * n, max)."""


class DiffusionDPO(ForwardAlgorithm):
    """Diffusion-DPO on the best and the worst sample of each group (Wallace et al. 2023, arXiv 2311.12908)."""

    type: Literal["diffusion_dpo"] = "diffusion_dpo"
    whole: ClassVar[Literal["group", "pair"] | None] = "pair"
    beta: PositiveFloat = 2000.0


class PictureDPO(AlgorithmSection):
    """Diffusion-DPO on given pairs of pictures (Wallace et al. 2023, arXiv 2311.12908)."""

    trains_on: ClassVar[TrainsOn] = "picture_pairs"
    kind: ClassVar[Kind] = "offline"
    type: Literal["picture_dpo"] = "picture_dpo"
    beta: PositiveFloat = 2000.0

    @property
    def compares_group(self) -> bool:
        return False

    def loss_guidance(self, sampling: float) -> float:
        return 1.0


class RWR(ForwardAlgorithm):
    """Reward-weighted fine-tuning on the run's own samples (Lee et al. 2023, arXiv 2302.12192)."""

    type: Literal["rwr"] = "rwr"
    weights: Literal["softmax", "best"] = "softmax"
    """A sample counts by the softmax of its group's standardised rewards, or the best one of each group alone (SFT on
    own samples)."""
    temperature: PositiveFloat = 1.0
    """Of the softmax, in standard deviations of the group."""
    kl_coef: NonNegative = 0.0
    """Weight of the squared distance to the reference's velocity."""


class DGPO(ForwardAlgorithm, PictureAlgorithm):
    """Direct group preference optimisation (Luo et al. 2025, arXiv 2510.08425)."""

    type: Literal["dgpo"] = "dgpo"
    whole: ClassVar[Literal["group", "pair"] | None] = "group"
    noise_levels: PositiveInt | None = 4
    """Noise levels trained per group; None takes every one above t_min."""
    t_min: Fraction = 0.3
    """Share of the rollout's steps, at its end, whose levels do not train: of 10 steps the first 7 train."""
    beta: PositiveFloat = 100.0
    advantage_std: Spread = "group"
    kl_coef: NonNegative = 0.0
    """Weight of the squared distance to the reference's velocity."""
    clip_range: PositiveFloat | None = 1e-2
    """A sample whose error has moved further than this from the average policy's, the way its advantage asks, moves it
    no more (0.001 to 0.01 with guidance in sampling, 1e-5 to 1e-4 without); None does not clip."""
    reference: Literal["start", "average"] = "start"
    """What the errors are compared with: the policy as the run began, or its moving average (with beta 2000 to
    5000)."""
    average_samples_after: Annotated[int, Field(ge=0)] | None = 200
    """After so many steps the moving average draws the samples; None: the policy, always."""
    average_decay_rate: NonNegative = 0.001
    average_decay_max: Fraction = 0.3
    """After step n the average becomes d * average + (1 - d) * policy, d = min(rate * n, max)."""

    def levels(self, steps: int) -> list[int]:
        return super().levels(steps)[: math.ceil(round(steps * (1 - self.t_min), 6))]


class PathwiseAlgorithm(AlgorithmSection):
    """A differentiable reward, sampled and decoded inside the update (abstract)."""

    kind: ClassVar[Kind] = "pathwise"
    kl_coef: NonNegative = 0.0
    """Weight of the squared distance to the reference's velocity, at the steps with a graph."""

    @property
    def compares_group(self) -> bool:
        return False


class DRaFT(PathwiseAlgorithm):
    """Reward back-propagation through the last K steps (Clark et al. 2023, arXiv 2309.17400)."""

    type: Literal["draft"] = "draft"
    last_steps: PositiveInt = 1
    renoise: Annotated[int, Field(ge=0)] = 0
    """DRaFT-LV: noise the picture to the last step's level again so many times (2 in the paper), predict it anew each
    time, and average the gradients; with last_steps 1."""


class ReFL(PathwiseAlgorithm):
    """Reward of the picture predicted at one random late step (Xu et al. 2023, arXiv 2304.05977)."""

    type: Literal["refl"] = "refl"
    late: Decay = 0.75
    """Share of the steps after which the step is drawn (30 of 40 in the paper)."""
    threshold: float = 2.0
    """A reward beyond it has no gradient."""
    scale: PositiveFloat = 1e-3


class AlignProp(PathwiseAlgorithm):
    """Back-propagation through a random number of last steps (Prabhudesai et al. 2023, arXiv 2310.03739)."""

    type: Literal["alignprop"] = "alignprop"
    last_steps: PositiveInt | None = None
    """None draws the number anew in every training step, from 1 to all with equal chances."""
    target: float | None = None
    """The loss is the reward's distance to it (10 for the aesthetic score); None follows the reward itself."""
    scale: PositiveFloat = 1.0


class SRPO(PathwiseAlgorithm):
    """Rewards of pictures recovered by their known noise, relative to unwanted words (Shen et al. 2025, arXiv
    2509.06942)."""

    type: Literal["srpo"] = "srpo"
    wanted: tuple[str, ...] = ("Natural-lighting", "Detail", "Detailed", "Real")
    """Words before the prompt, one a training step in turn, that the reward shall prefer pictures with; [] takes the
    reward itself."""
    unwanted: tuple[str, ...] = ("Concept art", "Painting", "Anime", "Flat", "Oil")
    lowest: Annotated[float, Field(gt=0, lt=1)] = 0.75
    highest: Annotated[float, Field(gt=0, lt=1)] = 0.964
    """Noise levels that train: of the authors' 50 steps with shift 3 the 5th to the 25th."""
    jump: Annotated[float, Field(gt=0, le=0.5)] = 0.1
    """How far one prediction goes, as a share of these levels."""
    discount: tuple[float, float] = (0.1, 0.25)
    """What the reward counts beside the difference of the words, at the lowest and at the highest level; predictions
    toward the picture."""
    discount_inverted: tuple[float, float] = (0.3, 0.01)
    """The same of predictions away from it."""
    threshold: float = 0.7
    """A relative reward beyond it has no gradient."""
