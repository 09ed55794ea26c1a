"""The data of the loop: prompts, samples (which rewards see) and trajectories (which updates use).

Shapes: ``B`` samples (groups of ``K`` samples of one prompt, contiguous), ``T`` actions (denoising steps, or
tokens). Log-probs, masks and ratios are ``[B, T]`` whatever the modality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mmrl.json_types import Cell
from mmrl.media import Media
from mmrl.transfer import picked

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


REASONING = ("reasoning_content", "reasoning", "thinking")
"""The keys under which messages of the assistant have its reasoning, for the chat templates that read it there."""


class Turn(NamedTuple):
    """A message of a conversation, before the one that is to be answered."""

    role: Literal["user", "assistant"]
    text: str
    more: tuple[tuple[str, str], ...] = ()
    """Its reasoning: a key of ``REASONING`` and the text."""


class AskedSize(NamedTuple):
    """What a record says of the size of its picture or clip, as it says it; ``mmrl.datasets.buckets`` reads it."""

    height: Cell = None
    """Pixels."""
    width: Cell = None
    aspect_ratio: Cell = None
    """Width / height."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. ``meta`` carries what a reward must know of it (the truth of a scene, say); JSON values only.

    ``text`` is the message to answer, and ``turns`` what was said before it. ``media`` are the pictures and clips of
    all of the user's messages, in the order of their ``<image>`` and ``<video>`` placeholders (before the first message
    where there are none). ``system`` is a system message for models with a chat template. ``negative_prompt`` is what
    classifier-free guidance moves away from (pictures and clips); None takes the recipe's.
    ``max_new_tokens`` is a limit of its responses, below that of the recipe. ``size`` is what is wanted of the picture
    or clip, where the recipe has several sizes (``sampling.buckets``).
    """

    id: str
    text: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[Media, ...] = ()
    system: str | None = None
    negative_prompt: str | None = None
    turns: tuple[Turn, ...] = ()
    max_new_tokens: int | None = None
    size: AskedSize | None = None

    @property
    def conversation(self) -> str:
        """``text``; behind the turns before it, each under its role, where there are any."""
        if not self.turns:
            return self.text
        return "\n\n".join(f"{role}: {text}" for role, text, _ in (*self.turns, Turn("user", self.text)))


ONLY_SAMPLED = -2
"""The step of a slot that nothing trains on and nothing measures: its prompt needs what sampling needs, and no pair."""


@dataclass(frozen=True)
class Slot:
    """A place in a step's batch. The same slot holds the same prompt and noise whoever runs it."""

    step: int
    index: int
    attempt: int
    prompt: Prompt


@dataclass(frozen=True)
class SampleId:
    """The identity of a sample. With the run's seed and a purpose it determines the sample's randomness."""

    step: int
    slot: int
    attempt: int
    sample: int


@dataclass(frozen=True)
class Sample:
    """What a reward sees of one trajectory: the prompt and the clean result.

    ``image`` is an RGB PIL image (of the size the pipeline made), ``video`` the frames of a clip, in order; ``tensor``
    is the same as float32 ``[3, H, W]`` or ``[F, 3, H, W]`` in [0, 1], and carries a graph when the reward was declared
    differentiable. ``text`` is a language model's response,
    ``truncated`` where it was cut at the length limit; ``begun``, what the chat template wrote of it: the mark of a
    thought, ``<think>`` and a line break.
    """

    prompt: Prompt
    id: SampleId
    image: Image | None = None
    tensor: torch.Tensor | None = None
    text: str | None = None
    truncated: bool = False
    video: tuple[Image, ...] | None = None
    begun: str = ""


_ROWS = ("clean", "states", "log_probs", "paused", "mask", "truncated", "under_way", "drawn_at")
"""The tensors of a trajectory that have a row per sample."""


@dataclass
class Trajectory:
    """What sampling left behind for a batch of ``B`` samples, on the controller that owns them.

    ``clean`` is the final result in the policy's own space: latents ``[B, C, H, W]`` float32, or response tokens
    ``[B, T]`` int64. ``log_probs`` ``[B, T]`` are those of the actions under the distribution they were drawn from.
    ``features`` name what each row is conditioned on in the controller's feature store.

    Of denoising: ``states`` before and after each recorded action, ``[B, T + 1, ...]`` float32, and ``actions``
    ``[T]``, their indices in the schedule; None where no action was recorded (forward-process objectives). Of samples
    that are begun and not finished (``midway``): ``paused`` ``[B, 2 or 3, ...]``, the latents, the velocity there and,
    of a solver of second order, the prediction before; ``clean`` is the predicted result. Of text:
    ``mask`` ``[B, T]`` float32, 1 on response tokens (the end-of-text token among them), 0 on padding; ``truncated``
    ``[B]`` bool, cut at the length limit. Of text drawn in parts: ``under_way`` ``[B]`` bool, to be gone on with, and
    ``drawn_at`` ``[B, T]`` int64, the training step under whose weights each token was drawn.
    """

    slots: list[Slot]
    ids: list[SampleId]
    clean: torch.Tensor
    features: list[str]
    states: torch.Tensor | None = None
    actions: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    paused: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    truncated: torch.Tensor | None = None
    under_way: torch.Tensor | None = None
    drawn_at: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def responses(self) -> list[int]:
        """Text: the number of tokens of each response, copied from the device once."""
        assert self.mask is not None
        return self.mask.sum(1).long().tolist()

    @staticmethod
    def join(parts: Sequence[Trajectory]) -> Trajectory:
        """The rows of several trajectories, which recorded the same actions, one after another.

        Responses are padded with 0 to the longest.
        """
        columns = {name: [getattr(p, name) for p in parts] for name in _ROWS}
        return replace(
            parts[0],
            slots=[s for p in parts for s in p.slots],
            ids=[i for p in parts for i in p.ids],
            features=[f for p in parts for f in p.features],
            **{name: None if column[0] is None else _stacked(column) for name, column in columns.items()},
        )

    def rows(self, index: list[int]) -> Trajectory:
        """The trajectory of the rows ``index``; padding after the longest of their responses is removed."""
        longest = None if self.mask is None else max(1, *(self.responses[i] for i in index))
        columns = {name: getattr(self, name) for name in _ROWS}
        found = {name: None if column is None else picked(column, index) for name, column in columns.items()}
        cut = {name: c if c is None or c.ndim == 1 else c[:, :longest] for name, c in found.items()}
        return replace(
            self,
            slots=[self.slots[i] for i in index],
            ids=[self.ids[i] for i in index],
            features=[self.features[i] for i in index],
            **cut,
        )


def _stacked(column: list[torch.Tensor]) -> torch.Tensor:
    """Rows of several tensors, padded with zeros along their second dimension where that differs."""
    import torch
    from torch.nn.functional import pad

    if column[0].ndim != 2:
        return torch.cat(column)
    longest = max(c.shape[1] for c in column)
    return torch.cat([pad(c, (0, longest - c.shape[1])) for c in column])
