"""The settings that all algorithms share, and those that one kind shares. Imports no algorithm, no torch.

An algorithm's own settings are in the file of its objective; the defaults are those of its paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field, PositiveFloat, PositiveInt

from mmrl.config.sampling import Sampling, TextSampling
from mmrl.config.section import Fraction, NonNegative, Section
from mmrl.core.errors import UserError

Kind = Literal["policy_gradient", "forward_process", "pathwise", "offline"]
"""What an update trains on: recorded actions, clean samples noised afresh, a differentiable reward, or
given pairs or responses."""
TrainsOn = Literal["denoising", "tokens", "pairs", "responses", "picture_pairs", "given_pictures"]
Spread = Literal["group", "batch", "none"]
"""What centred rewards are divided by: the standard deviation of their group, of the batch, or nothing."""
AdvantageAggregation = Literal["sum", "each", "gdpo"]
"""How several rewards become one advantage: the advantage of their weighted sum; the weighted sum of an advantage per
reward (MixGRPO, arXiv 2507.21802), so that a reward that varies much does not dominate; or the same, standardised over
the batch again (GDPO, arXiv 2601.05242)."""
KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]
AggregationMode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
"""How the losses of tokens become one number, by verl's names: over all tokens alike, or per response first."""


class AlgorithmSettings(Section):
    """The section ``algorithm`` of a recipe, and the properties of its algorithm (abstract)."""

    trains_on: ClassVar[TrainsOn] = "denoising"
    """The data of a step: denoised pictures and clips, sampled text, given responses or pictures, or pairs of a
    better and a worse text or picture."""
    kind: ClassVar[Kind] = "policy_gradient"
    uses_token_rewards: ClassVar[bool] = False
    """Whether the algorithm reads rewards of single tokens; the others would ignore them."""
    whole: ClassVar[Literal["group", "pair"] | None] = None
    """What must not be split over micro-batches: a whole group, or a whole pair."""
    takes_older_samples: ClassVar[bool] = True
    """Whether it may train on samples of older weights, with or without an importance weight."""
    trains_few: ClassVar[bool] = False
    """Whether only a few rows of a step have a weight, so that an update leaves out the others' work."""
    trains_scores: ClassVar[bool] = False
    """Whether the model scores a text, in place of writing it."""
    teaches_itself: ClassVar[bool] = False
    """Whether the policy, shown a hint, is the teacher of its own responses."""
    scores_steps: ClassVar[bool] = False
    """Whether the results that are predicted before each recorded denoising step are scored, too."""
    exact_replay: ClassVar[bool] = False
    """Whether the mean of a denoising step is compared with the mean at sampling time, so that replay must reproduce it
    almost exactly."""

    type: str = ""
    """The name of the algorithm's file, or path/to/file.py:Class; required in a recipe."""

    @property
    def label(self) -> str:
        """A short name: for ``path/to/file.py:Class`` the class."""
        return self.type.rpartition(":")[2].rpartition("/")[2].removesuffix(".py")

    @property
    def compares_group(self) -> bool:
        """Whether a sample is compared with the others of its prompt, so that a group of one has no signal."""
        return True

    @property
    def given_texts(self) -> Mapping[str, str]:
        """For given texts: the name of each text of a row, and the column of the data that has it."""
        return {}

    @property
    def attempts(self) -> int | None:
        """How many groups may be sampled for a slot, where groups whose rewards are all equal are replaced; None where
        they are kept."""
        return None

    @property
    def aggregates(self) -> AdvantageAggregation:
        """``advantage_aggregation``, or the weighted sum of the rewards where the algorithm has no such key."""
        return getattr(self, "advantage_aggregation", "sum")

    def loss_guidance(self, sampling: float) -> float:
        """The guidance scale of the predictions that train; ``sampling`` is sampling.guidance_scale."""
        return sampling

    def conflicts(self, sampling: Sampling | TextSampling) -> Iterator[str]:
        """The settings that cannot work, alone or with this sampling: ``key: why; edit`` each."""
        yield from ()

    def unread(self, updates: int) -> Iterator[str]:
        """The settings without effect where a step has so many ``updates``: ``key: why; edit`` each."""
        yield from ()


class TokenSettings(AlgorithmSettings):
    """What the policy gradients over tokens share (abstract)."""

    trains_on: ClassVar[TrainsOn] = "tokens"
    divergence_in_loss: ClassVar[bool] = True
    """Whether the divergence is a term of the loss, with the recipe's estimator."""
    kl_coef: NonNegative = 0.0
    """Weight of the divergence from the reference model; 0 needs no reference."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of that divergence in the loss (Schulman 2020). ``k1+`` and ``k3+`` have the value of k1 and k3 and the
    gradient of k2, which is the unbiased one (straight-through; verl's ``kl+`` and ``low_var_kl+``)."""
    kl_max: PositiveFloat | None = None
    """Limit of the estimate of a token, in nats: it is clamped to [-kl_max, kl_max], and has no gradient beyond;
    ``k1+`` and ``k3+`` keep that of k2 (verl: 10 for k3, no limit for others)."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus, which is averaged as the loss is: with ``seq_mean_token_mean`` over each response,
    so that a token of a long one counts less."""
    max_new_tokens: PositiveInt | None = None
    """The length limit, by which ``seq_mean_token_sum_norm`` divides and beyond which a response is overlong; None
    takes sampling.max_new_tokens."""
    mask_truncated: bool = False
    """Leave responses that were cut at the length limit out of the loss and its mean; their rewards still count in
    their group's. TRL's ``mask_truncated_completions`` keeps them in the mean: its gradient is smaller by the share
    of the responses that is left."""
    drop_zero_std_groups: bool = False
    """Leave groups in which no sample has an advantage out of the loss's mean, to which they add 0 otherwise."""
    dynamic_sampling: bool = False
    """Draw new prompts in place of groups whose rewards are all equal (DAPO)."""
    max_attempts: PositiveInt = 10
    """Largest number of sampling rounds in a step with dynamic_sampling."""

    @property
    def attempts(self) -> int | None:
        return self.max_attempts if self.dynamic_sampling else None

    def conflicts(self, sampling: Sampling | TextSampling) -> Iterator[str]:
        yield from super().conflicts(sampling)
        for key in self.changed("kl_estimator", "kl_max"):
            if not self.divergence_in_loss:
                yield f"algorithm.{key}: {self.label} does not add the divergence to the loss this way; remove the key"
            elif not self.kl_coef:
                yield f"algorithm.{key}: kl_coef is 0, so no divergence is computed; set kl_coef, or remove the key"


class ClippedSettings(TokenSettings):
    """A clipped surrogate: the ratio counts within [1 - clip_low, 1 + clip_high] (abstract)."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """A ratio below 1 minus this is clipped."""
    clip_high: PositiveFloat = 0.2
    """A ratio above 1 plus this is clipped."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper limit of the ratio where the advantage is negative (dual-clip PPO, arXiv 1912.09729, eq. 5; verl's
    ``clip_ratio_c``, 3 there). None sets no limit."""

    @property
    def clip(self) -> tuple[float, float, float | None]:
        """The clip ranges as ``clipped_surrogate`` takes them."""
        return self.clip_low, self.clip_high, self.dual_clip


class TurnSettings(TokenSettings):
    """Advantages of groups that may be those of turns, where an environment answers (abstract)."""

    credit: Literal["episode", "turn"] = "episode"
    """What an advantage covers. ``turn``: each turn of an episode also gets credit for what follows it, compared with
    the turns that were taken in the same state (GiGPO, arXiv 2505.10978; docs/environments.md)."""
    turn_discount: Fraction = 0.95
    """Factor of a reward for each turn that lies before it (verl-agent's ``gamma``)."""
    turn_weight: NonNegative = 1.0
    """Weight of a turn's advantage beside the episode's (verl-agent's ``step_advantage_w``)."""

    @property
    def spread(self) -> Spread:
        """``advantage_std``, or no division where the algorithm has no such key."""
        return getattr(self, "advantage_std", "none")

    def conflicts(self, sampling: Sampling | TextSampling) -> Iterator[str]:
        yield from super().conflicts(sampling)
        if self.credit == "turn":
            if self.aggregates != "sum":
                yield (
                    "algorithm.advantage_aggregation: the credit of a turn is that of the sum of the rewards; set it "
                    "to sum, or set algorithm.credit to episode"
                )
            return
        for key in self.changed(*TURN_KEYS[1:]):
            yield f"algorithm.{key}: only the credit of turns has it; set algorithm.credit to turn, or remove it"


TURN_KEYS = ("credit", "turn_discount", "turn_weight")
"""The keys of ``TurnSettings``."""


class CriticSettings(TokenSettings):
    """A critic that values each token trains with the policy (abstract)."""

    critic_lr: PositiveFloat = 1e-5
    """Peak learning rate of the critic; the rest of its optimizer is set by optim."""


class GivenSettings(AlgorithmSettings):
    """Given texts (abstract)."""

    kind: ClassVar[Kind] = "offline"

    @property
    def compares_group(self) -> bool:
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the policy at the start of the run."""
        return False


class PairSettings(GivenSettings):
    """Given pairs of texts (abstract)."""

    trains_on: ClassVar[TrainsOn] = "pairs"

    @property
    def given_texts(self) -> Mapping[str, str]:
        return {"chosen": "chosen", "rejected": "rejected"}


class ResponseSettings(GivenSettings):
    """Given responses, one per prompt (abstract)."""

    trains_on: ClassVar[TrainsOn] = "responses"
    completion: str = "completion"
    """The column of the data that has the response. ``chosen`` takes the better text of pairs."""
    mismatches: ClassVar[bool] = False
    """Whether each prompt is also paired with the response of a different prompt."""

    @property
    def label_column(self) -> str | None:
        """The column of the data that says whether a response is good; None where all are."""
        return None

    @property
    def given_texts(self) -> Mapping[str, str]:
        return {"completion": self.completion}


class GivenPictureSettings(AlgorithmSettings):
    """Given pictures or clips (abstract)."""

    kind: ClassVar[Kind] = "offline"

    @property
    def compares_group(self) -> bool:
        return False

    def loss_guidance(self, sampling: float) -> float:
        return 1.0


class PictureSettings(AlgorithmSettings):
    """Shared by the algorithms that compute a picture's advantage from its group's rewards (abstract)."""

    advantage_clip: PositiveFloat = 5.0
    """Advantages are clipped to plus and minus this."""
    advantage_std: Spread = "batch"
    """Divide the centred reward by the group's standard deviation or by the batch's (Flow-GRPO's default)."""
    advantage_aggregation: AdvantageAggregation = "sum"
    drop_zero_std_groups: bool = False
    """Leave groups in which no sample has an advantage out of the loss's mean, to which they add 0 otherwise."""
    dynamic_sampling: bool = False
    """Draw new prompts in place of groups whose rewards are all equal (DAPO, arXiv 2503.14476)."""
    max_attempts: PositiveInt = 10
    """Largest number of groups drawn for a slot with dynamic_sampling."""

    @property
    def attempts(self) -> int | None:
        return self.max_attempts if self.dynamic_sampling else None


class StepSettings(PictureSettings):
    """A policy gradient over denoising steps (abstract)."""

    kl_coef: NonNegative = 0.04
    """Weight of the divergence from the reference model; 0 needs no reference."""
    trained_steps: PositiveInt | None = None
    """Number of recorded steps to train, drawn anew in every training step (DanceGRPO: 60 % of them); None trains
    all."""


class ForwardSettings(AlgorithmSettings):
    """Clean samples noised afresh (abstract)."""

    kind: ClassVar[Kind] = "forward_process"
    takes_older_samples: ClassVar[bool] = False
    stratified: ClassVar[bool] = False
    """Whether a sample's levels are drawn one from each of equal parts of those that train, not all from the whole."""
    guidance: NonNegative | Literal["sampling"] = 1.0
    """Guidance scale of the predictions in the loss. 1 (or less) predicts with the prompt alone, as the authors do;
    ``sampling`` takes sampling.guidance_scale (Flow-Factory's and verl-omni's DiffusionNFT)."""
    noise_levels: PositiveInt | None = None
    """Noise levels trained per sample; None takes every rollout step but the last."""

    def loss_guidance(self, sampling: float) -> float:
        return sampling if self.guidance == "sampling" else self.guidance

    def guidance_of_reference(self, sampling: float) -> float:
        """The guidance scale of the reference's predictions in the loss."""
        return self.loss_guidance(sampling)

    def levels(self, steps: int) -> list[int]:
        """Which of the noise levels of a rollout's ``steps`` may train: all but the last."""
        return list(range(steps - 1))


class PathwiseSettings(AlgorithmSettings):
    """A differentiable reward, sampled and decoded inside the update (abstract)."""

    kind: ClassVar[Kind] = "pathwise"
    kl_coef: NonNegative = 0.0
    """Weight of the squared distance to the reference's velocity, at the steps with a graph."""

    @property
    def compares_group(self) -> bool:
        return False


A = TypeVar("A", bound=AlgorithmSettings)


def with_length_limit(algorithm: A, max_new_tokens: int) -> A:
    """``algorithm`` with its ``max_new_tokens`` filled in if it has that setting and it is None."""
    if isinstance(algorithm, TokenSettings) and algorithm.max_new_tokens is None:
        return algorithm.model_copy(update={"max_new_tokens": max_new_tokens})
    return algorithm


def length_limit(settings: TokenSettings) -> int:
    """The section's ``max_new_tokens``; raises ``UserError`` if it is None."""
    if settings.max_new_tokens is None:
        raise UserError(
            f"algorithm.max_new_tokens: this {settings.label or type(settings).__name__} measures lengths against a "
            "limit and there is none; set it, or sampling.max_new_tokens"
        )
    return settings.max_new_tokens
