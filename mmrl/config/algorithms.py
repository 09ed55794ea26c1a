"""The sections of the algorithms for text and for pairs, and of all: the defaults are the settings of each one's paper.

Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field, PositiveFloat, PositiveInt

from mmrl.config.picture_algorithms import (
    AWM,
    DGPO,
    RWR,
    SRPO,
    AlignProp,
    DiffusionDPO,
    DiffusionNFT,
    DRaFT,
    FlowDPPO,
    FlowGRPO,
    GRPOGuard,
    PictureDPO,
    ReFL,
)
from mmrl.config.section import (
    AdvantageAggregation,
    AlgorithmSection,
    Fraction,
    Kind,
    NonNegative,
    Spread,
    TrainsOn,
)
from mmrl.errors import UserError

AggregationMode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
"""How the losses of tokens become one number, by the field's names: over all tokens alike, or per response first."""


class TokenAlgorithm(AlgorithmSection):
    """What the policy gradients over tokens share (abstract)."""

    trains_on: ClassVar[TrainsOn] = "tokens"
    kl_coef: NonNegative = 0.0
    """Weight of the divergence from the reference model; 0 needs no reference."""
    entropy_coef: NonNegative = 0.0
    """Weight of the policy's entropy, which is raised."""
    max_new_tokens: PositiveInt | None = None
    """The length limit that ``seq_mean_token_sum_norm`` divides by and that overlong responses are measured against;
    None takes sampling.max_new_tokens."""
    dynamic_sampling: bool = False
    """Draw other prompts in place of groups whose rewards are all equal (DAPO)."""
    max_attempts: PositiveInt = 10
    """Rounds of sampling in a step at most, where dynamic_sampling is on."""


class ClippedAlgorithm(TokenAlgorithm):
    """A clipped surrogate: the ratio moves a token's loss inside [1 - clip_low, 1 + clip_high] (abstract)."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: PositiveFloat = 0.2


class GRPO(ClippedAlgorithm):
    """Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300).

    TRL's GRPOTrainer (1.16) has other defaults: kl_coef 0 and aggregation token_mean (its loss_type "dapo").
    """

    type: Literal["grpo"] = "grpo"
    aggregation: AggregationMode = "seq_mean_token_mean"
    advantage_std: Spread = "group"
    advantage_aggregation: AdvantageAggregation = "sum"
    kl_coef: NonNegative = 0.04


class DrGRPO(ClippedAlgorithm):
    """GRPO without its biases of length and difficulty (Liu et al. 2025, arXiv 2503.20783)."""

    type: Literal["dr_grpo"] = "dr_grpo"
    aggregation: AggregationMode = "seq_mean_token_sum_norm"


class RLOO(ClippedAlgorithm):
    """REINFORCE with a leave-one-out baseline, a response as one action (Ahmadian et al. 2024, arXiv 2402.14740)."""

    type: Literal["rloo"] = "rloo"
    kl_coef: NonNegative = 0.05
    """Of the response's divergence, taken from its reward (TRL's default)."""


class ReinforcePP(ClippedAlgorithm):
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262), with or without the group baseline."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    variant: Literal["plain", "baseline"] = "plain"
    """``plain``: each token's divergence is taken from its reward, and a group of 1 will do. ``baseline``: the group's
    mean is taken off the reward first, and the divergence (k2) is a term of the loss."""
    aggregation: AggregationMode = "token_mean"
    kl_coef: NonNegative = 0.01
    gamma: Fraction = 1.0

    uses_token_rewards: ClassVar[bool] = True

    @property
    def compares_group(self) -> bool:
        return self.variant == "baseline"


class DAPO(ClippedAlgorithm):
    """Decoupled clip and dynamic sampling (Yu et al. 2025, arXiv 2503.14476)."""

    type: Literal["dapo"] = "dapo"
    clip_high: PositiveFloat = 0.28
    aggregation: AggregationMode = "token_mean"
    advantage_std: Spread = "group"
    overlong_buffer: Fraction = 0.2
    """Share of max_new_tokens at its end over which the punishment of length grows from 0 to overlong_penalty (4096 of
    20480 tokens in the paper); 0 punishes nothing."""
    overlong_penalty: NonNegative = 1.0
    dynamic_sampling: bool = True


class GSPO(ClippedAlgorithm):
    """Group sequence policy optimisation: one length-normalised ratio a response (Zheng et al. 2025, 2507.18071)."""

    type: Literal["gspo"] = "gspo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
    clip_high: PositiveFloat = 4e-4
    advantage_std: Spread = "group"
    advantage_aggregation: AdvantageAggregation = "sum"


class CISPO(TokenAlgorithm):
    """Clipped importance weights, no token dropped (MiniMax-M1, arXiv 2506.13585)."""

    type: Literal["cispo"] = "cispo"
    aggregation: AggregationMode = "token_mean"
    advantage_std: Spread = "group"
    advantage_aggregation: AdvantageAggregation = "sum"
    ratio_max: PositiveFloat = 5.0
    """Upper bound of the detached ratio (1 + the paper's epsilon high, which it does not give; ScaleRL, arXiv
    2510.13786, recommends 5). There is no lower bound, as in the paper."""


class PPO(ClippedAlgorithm):
    """Proximal policy optimisation with a critic per token (Schulman et al. 2017; Ouyang et al. 2022)."""

    type: Literal["ppo"] = "ppo"
    aggregation: AggregationMode = "token_mean"
    kl_coef: NonNegative = 0.05
    """Of each token's divergence, taken from its reward (TRL's default)."""
    gamma: Fraction = 1.0
    gae_lambda: Fraction = 0.95
    value_clip: PositiveFloat = 0.2
    """A new value counts no further than this from the value before the step's updates."""
    critic_lr: PositiveFloat = 1e-5
    """Peak learning rate of the critic's weights; its optimizer is otherwise as optim says."""

    uses_token_rewards: ClassVar[bool] = True

    @property
    def compares_group(self) -> bool:
        return False


class CAPO(ClippedAlgorithm):
    """Credit for steps by a generative judge's critique (Xie et al. 2025, arXiv 2508.02298)."""

    type: Literal["capo"] = "capo"
    aggregation: AggregationMode = "token_mean"
    outcome_weight: PositiveFloat = 2.0
    """Times the response's reward, on each of its tokens."""
    step_weight: NonNegative = 1.0
    """Times the rewards of single tokens: -1 in a step found wrong, less where critiques were averaged. The paper finds
    that it must stay below outcome_weight."""

    uses_token_rewards: ClassVar[bool] = True


class DPO(AlgorithmSection):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290)."""

    trains_on: ClassVar[TrainsOn] = "pairs"
    kind: ClassVar[Kind] = "offline"
    type: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs believed to be labelled the wrong way round (conservative DPO)."""
    reference_free: bool = False
    """Take the reference as uniform: no reference model is needed."""

    @property
    def compares_group(self) -> bool:
        return False


class RewardModel(AlgorithmSection):
    """A scalar reward model from pairs (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155)."""

    trains_on: ClassVar[TrainsOn] = "pairs"
    kind: ClassVar[Kind] = "offline"
    type: Literal["reward_model"] = "reward_model"
    center_coef: NonNegative = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores about 0 (Eisenstein et al. 2023, arXiv
    2312.09244, with 0.01)."""

    @property
    def compares_group(self) -> bool:
        return False


Algorithm = Annotated[
    FlowGRPO
    | GRPOGuard
    | FlowDPPO
    | DiffusionNFT
    | AWM
    | DGPO
    | DiffusionDPO
    | PictureDPO
    | RWR
    | DRaFT
    | ReFL
    | AlignProp
    | SRPO
    | GRPO
    | DrGRPO
    | RLOO
    | ReinforcePP
    | DAPO
    | GSPO
    | CISPO
    | PPO
    | CAPO
    | DPO
    | RewardModel,
    Field(discriminator="type"),
]


A = TypeVar("A", bound=AlgorithmSection)


def with_length_limit(algorithm: A, max_new_tokens: int) -> A:
    """``algorithm`` with its ``max_new_tokens`` filled in where it has one that was left to sampling."""
    if isinstance(algorithm, TokenAlgorithm) and algorithm.max_new_tokens is None:
        return algorithm.model_copy(update={"max_new_tokens": max_new_tokens})
    return algorithm


def length_limit(settings: TokenAlgorithm) -> int:
    """The section's ``max_new_tokens``; raises ``UserError`` where it was left to sampling and nothing filled it in."""
    if settings.max_new_tokens is None:
        raise UserError(
            f"algorithm.max_new_tokens: this {type(settings).__name__} measures lengths against a limit and there is "
            "none; set it, or sampling.max_new_tokens"
        )
    return settings.max_new_tokens
