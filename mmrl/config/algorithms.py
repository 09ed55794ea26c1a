"""The sections of the algorithms: the defaults are the settings of each one's paper. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field, PositiveFloat, PositiveInt

from mmrl.config.section import Decay, Fraction, NonNegative, Section
from mmrl.errors import UserError

Spread = Literal["group", "batch", "none"]
"""What centred rewards are divided by: the standard deviation of their group, of the batch, or nothing."""
Kind = Literal["policy_gradient", "forward_process", "pathwise", "offline"]
"""What an update is made of (DESIGN 2): recorded actions, clean results noised afresh, a differentiable reward, or
given pairs."""
AdvantageAggregation = Literal["sum", "each", "gdpo"]
"""How several rewards become one advantage: of their weighted sum; one of each reward, then their weighted sum
(MixGRPO, arXiv 2507.21802), so that a reward that varies much does not drown the others; or the same, standardised over
the batch again (GDPO, arXiv 2601.05242)."""
AggregationMode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
"""How the losses of tokens become one number, by the field's names: over all tokens alike, or per response first."""


class AlgorithmSection(Section):
    """What every algorithm says of itself, beside its settings (abstract)."""

    trains_on: ClassVar[Literal["denoising", "tokens", "pairs"]] = "denoising"
    """What a step is made of: denoised pictures and clips, sampled text, or pairs of a better and a worse text."""
    kind: ClassVar[Kind] = "policy_gradient"
    uses_token_rewards: ClassVar[bool] = False
    """Rewards of single tokens count; elsewhere they would be lost."""
    whole: ClassVar[Literal["group", "pair"] | None] = None
    """What an update must see in one slice."""

    @property
    def compares_group(self) -> bool:
        """Whether a sample is judged against the others of its prompt, so that a group of one teaches nothing."""
        return True


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
    makes all steps' gradients alike (Flash-GRPO, arXiv 2605.15980)."""


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
    noise_levels: PositiveInt | None = None
    """Noise levels trained per sample; None takes every rollout step but the last."""


class DiffusionNFT(ForwardAlgorithm, PictureAlgorithm):
    """Forward-process optimisation (Zheng et al. 2025, arXiv 2509.16117)."""

    type: Literal["diffusion_nft"] = "diffusion_nft"
    beta: PositiveFloat = 1.0
    kl_coef: NonNegative = 1e-4
    """Weight of the squared distance to the reference's velocity."""
    old_decay_rate: NonNegative = 0.001
    old_decay_max: Fraction = 0.5
    """After step n the old policy becomes d * old + (1 - d) * policy, d = min(rate * n, max)."""


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
    beta: PositiveFloat = 100.0
    advantage_std: Spread = "group"
    kl_coef: NonNegative = 0.0
    """Weight of the squared distance to the reference's velocity."""


class PathwiseAlgorithm(AlgorithmSection):
    """A differentiable reward, sampled and decoded inside the update (abstract)."""

    kind: ClassVar[Kind] = "pathwise"

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


class TokenAlgorithm(AlgorithmSection):
    """What the policy gradients over tokens share (abstract)."""

    trains_on: ClassVar[Literal["denoising", "tokens", "pairs"]] = "tokens"
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

    trains_on: ClassVar[Literal["denoising", "tokens", "pairs"]] = "pairs"
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

    trains_on: ClassVar[Literal["denoising", "tokens", "pairs"]] = "pairs"
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
    | RWR
    | DRaFT
    | ReFL
    | AlignProp
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
