"""The protocols of pipelines: sample prompts into rows and recompute those with the current weights.

There are two kinds, by ``makes``: text, and what denoising makes, pictures and clips. A pipeline knows its model
family, its latent layout or chat template, and no algorithm. ``build(recipe, ...)`` of its module makes one;
``describe(recipe, ...)`` says what it would hold, for ``mmrl plan``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

from torch import Tensor, nn

from mmrl.algorithms.objective import GraphSteps, Kind
from mmrl.controller.features import FeatureStore
from mmrl.core.trajectory import DenoisingRows, Prompt, Rows, Sample, SampleId, Slot, TextRows
from mmrl.logging.card import Usage, What
from mmrl.models.policy import Policy

if TYPE_CHECKING:  # slow to import
    from mmrl.models.text.packing import Packing

Weights = Callable[[str], AbstractContextManager[None]]
"""``with weights("reference"):`` computes under that copy of the trained weights (``policy.using``)."""


class PairUpdates(Protocol):
    """The given pairs or responses of a pipeline."""

    def sizes(self, rows: Rows) -> Sequence[int]:
        """What each row counts in an update's denominator, where the objective counts by length: the tokens of a given
        response, 1 of a pair."""
        ...


Made = TypeVar("Made", bound=Rows)
"""The rows that a pipeline samples."""


class _Pipeline(Protocol[Made]):
    """What the loop asks of every pipeline."""

    @property
    def makes(self) -> Literal["text", "image", "video"]:
        """What its samples are."""
        ...

    policy: nn.Module
    """The module that trains; parameters that do not train have ``requires_grad`` False."""
    features: FeatureStore

    @property
    def pairs(self) -> PairUpdates | None:
        """The given pairs or responses; None where the recipe trains on samples."""
        ...

    @property
    def reads_media(self) -> bool:
        """Whether a prompt may carry pictures."""
        ...

    def encode(self, slots: Sequence[Slot]) -> list[str]:
        """Have each prompt's features in the store, encoded once, and held; returns the keys to release."""
        ...

    def unused_negative(self, prompt: Prompt) -> str | None:
        """Why the negative prompt that ``prompt`` carries would not be used, with the edit; None where it is, or where
        it carries none. ``encode`` raises ``UserError`` with it."""
        ...

    def sync(self, policy: Policy) -> None:
        """Have the weights that sample equal the policy's present ones; nothing where those sample that train. Where
        they lie in shards and an engine samples, all ranks ask together (``device_tasks.sampling_phase``)."""
        ...

    def sample(
        self,
        slots: Sequence[Slot],
        ids: Sequence[SampleId],
        actions: Sequence[int],
        seed: int,
        *,
        evaluate: bool = False,
        version: tuple[int, str] | None = None,
    ) -> Made:
        """Sample a micro-batch without gradients. Pictures record the steps ``actions`` (none: a plain ODE); text
        records every token.

        ``evaluate`` takes the settings of the recipe's evaluation. ``version`` names the weights that sample
        (``Policy.tag``): a call may go on from what the last call under the same weights computed. None: it may not.
        """
        ...

    def begin(
        self,
        slots: Sequence[Slot],
        ids: Sequence[SampleId],
        actions: Sequence[int],
        seed: int,
        until: int,
        version: tuple[int, str] | None = None,
    ) -> Made:
        """The first ``until`` denoising steps, or tokens, of a micro-batch, as ``sample`` draws them. Of pictures
        ``clean`` is predicted and ``paused`` set; of text ``under_way`` marks the responses that have not ended."""
        ...

    def finish(self, begun: Made, actions: Sequence[int], seed: int, at: int) -> Made:
        """The rest of samples that ``begin`` left after ``at`` steps or tokens: what ``sample`` makes of them, within
        the rounding of another batch shape. An engine of text draws the rest with another seed."""
        ...

    def samples(self, rows: Made, inputs: frozenset[str]) -> list[Sample]:
        """Decode clean results to what rewards see, with the ``inputs`` they declared, no others."""
        ...

    def lengths(self, rows: Rows) -> list[int]:
        """Tokens of each row, prompt and response, by which micro-batches are packed; pairs: of both texts;
        pictures: 1 each."""
        ...

    def recorded(self, rows: Rows, entries: Sequence[int]) -> dict[str, Tensor]:
        """What an objective may compare the slice of these ``K`` entries with. Pictures: log_probs ``[B, K]``, std, dt
        and c_v (how far the mean moves with the velocity) ``[K]``; text, whatever ``entries``:
        mask and rollout_log_probs ``[B, T]``; given texts: what the data says of them (margins ``[B]``)."""
        ...

    def replay(self, rows: Made, actions: Sequence[int], needs: frozenset[str], weights: Weights) -> dict[str, Tensor]:
        """Recompute these ``K`` of the recorded actions with a graph, in one forward: log_probs ``[B, K]`` (text: all
        tokens, ``[B, T]``) and what else is needed."""
        ...

    def compare(self, rows: Rows, needs: frozenset[str], weights: Weights) -> dict[str, Tensor]:
        """For an offline objective: both sides of each row's given pair with a graph, as needed, ``[B]`` each. Of
        texts: chosen_log_probs and rejected_log_probs, or chosen_scores and rejected_scores; of pictures: chosen_error
        and rejected_error. Of a given response: completion_log_probs; of a given picture: picture_error and sigma. The
        same with ``reference_`` before it is without a graph. Raises ``TypeError`` where the recipe trains on
        samples."""
        ...

    def entries(self, kind: Kind) -> int:
        """In how many slices (actions, noise levels) an update of this kind takes a sample; text: 1, all tokens."""
        ...

    def updates(self) -> dict[str, float]:
        """Metrics of sampling on this device. Of an engine: what it was given since the run began
        (``perf/engine_<name>``), and what it reports itself (``engine/<name>``). Of pictures whose groups share steps:
        how many were saved since the run began (``perf/shared_steps``)."""
        ...

    def sleep(self) -> None:
        """Give back the device's memory that only sampling takes, until the next sample is asked for."""
        ...

    def close(self) -> None:
        """Free what it holds, engines and servers of its own as well."""
        ...

    def write(self, out: Path, what: What) -> None:
        """Write the policy under its present weights into the directory ``out``, in the libraries' own format.

        The policy in memory stays as it is. ``lora`` is asked for only where an adapter was trained.
        """
        ...

    def usage(self, folder: str, what: What, prompt: Prompt) -> Usage:
        """How to load what ``write`` wrote into ``folder``, and draw ``prompt`` with it."""
        ...


class TextPipeline(_Pipeline[TextRows], Protocol):
    """Samples tokens, with the model that trains or with an engine that has weights of its own."""

    @property
    def makes(self) -> Literal["text"]:
        """What its samples are."""
        ...

    @property
    def packing(self) -> Packing | None:
        """None where updates pad rows to the longest."""
        ...

    @property
    def refills(self) -> bool:
        """Whether it samples in this process, and a response takes the place of another that has ended."""
        ...

    def wake(self) -> bool:
        """Have its engine ready to sample; returns whether it was started for good."""
        ...

    def open_critic(self) -> nn.Module:
        """A critic with weights of its own, which ``replay`` asks for ``values`` from then on."""
        ...

    def unwritten(self, slots: Sequence[Slot], ids: Sequence[SampleId]) -> TextRows:
        """Rows without a token behind their prompts, all under way."""
        ...

    def continue_generation(self, rows: TextRows, most: int, seed: int) -> TextRows:
        """Draw at most ``most`` further tokens for every row, all of them under way, with its engine."""
        ...

    def hinted(self, prompt: Prompt, hint: str, most: int) -> dict[str, Tensor] | None:
        """What the model reads of ``prompt`` with ``hint`` behind its last message, per token, on the CPU; None where
        that has more than ``most`` tokens, or does not fit into the model's context with a response."""
        ...

    def token_values(self, row: TextRows, spans: Sequence[tuple[int, int, float]]) -> list[float]:
        """Sum the values of character ``spans`` (start, end, value) of one response on each of its tokens; those
        of an episode are of its transcript, and what was told has 0."""
        ...


class DenoisingPipeline(_Pipeline[DenoisingRows], Protocol):
    """Samples pictures or clips step by step, with the model that trains or with an engine that has its own weights."""

    @property
    def makes(self) -> Literal["image", "video"]:
        """What its samples are."""
        ...

    @property
    def masks(self) -> bool:
        """Whether the model picks tokens by masks, so that how many there are depends on what is in them."""
        ...

    @property
    def sounds(self) -> bool:
        """Whether its clips have a sound."""
        ...

    def modalities(self, states: Tensor) -> Mapping[str, Tensor]:
        """States ``[B, ...]`` of clips with sound, divided: ``video`` and ``audio``, ``[B, ...]`` each."""
        ...

    def draft(self, slots: Sequence[Slot], ids: Sequence[SampleId], seed: int, steps: int) -> DenoisingRows:
        """Whole samples in so many denoising steps, none with noise, from the noise that ``sample`` starts them from.
        No step is recorded."""
        ...

    def noisy_steps(self, step: int) -> list[int]:
        """Indices of the denoising steps (actions) recorded in training step ``step``."""
        ...

    def renoise(
        self, rows: DenoisingRows, level: int, seed: int, needs: frozenset[str], weights: Weights
    ) -> dict[str, Tensor]:
        """Noise clean results afresh to the ``level``-th noise level of each sample's own shuffle, predict with a
        graph: v, v_old, ... and target (noise less clean) ``[B, ...]`` as needed, x_s, x0 and sigma ``[B]``."""
        ...

    def generate(
        self,
        slots: Sequence[Slot],
        ids: Sequence[SampleId],
        path: GraphSteps,
        seed: int,
        needs: frozenset[str],
        weights: Weights,
    ) -> dict[str, Tensor]:
        """Sample with a graph through some steps and the decoder: ``images`` ``[(1 + path.renoised) * B, 3, H, W]`` in
        [0, 1], those that were predicted anew after the others; of ``J`` jumps those recovered, ``[J * B, 3, H, W]``,
        and ``from`` ``[J]``, the first level of each. ``latents`` are what the pictures were decoded from, without a
        graph; whether they are finite was not looked at. ``reference_distance`` ``[B]``, where needed: the squared
        distance to the velocity under ``weights("reference")``, mean over dimensions and over the steps with a
        graph."""
        ...


Pipeline = _Pipeline[Any]
"""A ``TextPipeline`` or a ``DenoisingPipeline``: ``of_text`` and ``of_pictures`` say which."""


def of_text(pipeline: Pipeline) -> TextPipeline:
    """For what only text has. The recipe's checks refuse to ask another pipeline for it: raises ``TypeError``."""
    if pipeline.makes != "text":
        raise TypeError(f"{type(pipeline).__name__} makes {pipeline.makes}, and only text has this")
    return cast("TextPipeline", pipeline)


def of_pictures(pipeline: Pipeline) -> DenoisingPipeline:
    """For what only denoising has. The recipe's checks refuse to ask another pipeline for it: raises ``TypeError``."""
    if pipeline.makes == "text":
        raise TypeError(f"{type(pipeline).__name__} makes text, and only pictures and clips have this")
    return cast("DenoisingPipeline", pipeline)


def recorded_steps(pipeline: Pipeline, step: int) -> list[int]:
    """Which denoising steps an objective on log-probs has recorded in training step ``step``; none of text, where every
    token is an action."""
    return [] if pipeline.makes == "text" else of_pictures(pipeline).noisy_steps(step)
