"""The data of the loop: prompts, samples (which rewards see) and rows (which updates use).

Shapes: ``B`` samples (groups of ``K`` samples of one prompt, contiguous), ``T`` actions (denoising steps, or
tokens). In an update log-probs, masks and ratios are ``[B, T]`` whatever the modality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar, get_args

from mmrl.core.episode import Episode
from mmrl.core.json_types import Cell
from mmrl.core.media import Media
from mmrl.core.transfer import picked, to_device

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
    """What a record says of the size of its picture or clip, as it says it; ``mmrl.data.buckets`` reads it."""

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


class Audio(NamedTuple):
    """The sound of a clip."""

    wave: torch.Tensor
    """``[channels, N]`` float32 in [-1, 1], on the CPU."""
    rate: int
    """Numbers a second."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a response and of its prompt, as the model read and wrote them."""

    ids: tuple[int, ...]
    written: tuple[tuple[int, int], ...]
    """The pieces ``ids[start:end]`` that the policy wrote, in order; it was told the others."""
    begins: tuple[int, ...] = (0,)
    """Where a text of its own begins: nothing before it is read there. More than one in an episode whose chat template
    writes earlier turns anew."""
    temperature: float = 1.0
    """That of the policy in training, ``sampling.temperature``."""

    @property
    def count(self) -> int:
        """How many of them the policy wrote."""
        return sum(end - start for start, end in self.written)


@dataclass(frozen=True)
class Sample:
    """What a reward sees of one trajectory: the prompt and the clean result.

    ``image`` is an RGB PIL image (of the size the pipeline made), ``video`` the frames of a clip, in order; ``tensor``
    is the same as float32 ``[3, H, W]`` or ``[F, 3, H, W]`` in [0, 1], and carries a graph when the reward was declared
    differentiable; ``audio`` is the sound of a clip, where the model makes one. ``text`` is a language model's
    response, ``truncated`` where it was cut at the length limit; ``begun``, what the chat template wrote of it: the
    mark of a thought, ``<think>`` and a line break. ``episode`` is what happened where the recipe has an environment;
    ``text`` is then the last turn. ``tokens`` are those of a language model's prompt and response.
    """

    prompt: Prompt
    id: SampleId
    image: Image | None = None
    tensor: torch.Tensor | None = None
    text: str | None = None
    truncated: bool = False
    video: tuple[Image, ...] | None = None
    begun: str = ""
    episode: Episode | None = None
    audio: Audio | None = None
    tokens: Tokens | None = None

    @property
    def transcript(self) -> str:
        """The response, all turns of it."""
        return (self.text or "") if self.episode is None else self.episode.text


R = TypeVar("R", bound="Rows")


@dataclass
class Rows:
    """The rows of an update: whose they are. Rows of prompts alone, as offline and pathwise objectives take them, hold
    nothing else."""

    slots: list[Slot]
    ids: list[SampleId]

    def __len__(self) -> int:
        return len(self.ids)

    def __getstate__(self) -> dict[str, Any]:
        """Without what was computed of the fields, which another thread may add to while they are sent."""
        return {of.name: getattr(self, of.name) for of in fields(self)}

    def rows(self, index: Sequence[int]) -> Self:
        """The rows ``index``, in this order."""
        return replace(self, slots=[self.slots[i] for i in index], ids=[self.ids[i] for i in index])

    @staticmethod
    def join(parts: Sequence[R]) -> R:
        """The rows of several of one kind, one after another."""
        return parts[0]._joined(parts)  # pyright: ignore[reportPrivateUsage]

    def _joined(self, parts: Sequence[Any]) -> Self:
        return replace(self, slots=[s for p in parts for s in p.slots], ids=[i for p in parts for i in p.ids])


@dataclass
class DenoisingRows(Rows):
    """Pictures or clips that were sampled step by step.

    ``clean`` ``[B, C, H, W]`` float32: the final latents. ``states`` ``[B, T + 1, ...]`` float32: latents before and
    after each recorded action; ``actions`` ``[T]``: the places of those in the schedule; ``log_probs`` ``[B, T]``. All
    three are None where no action was recorded (forward-process objectives). ``paused`` ``[B, 2 or 3, ...]``, of
    samples that are begun and not finished (``midway``): the latents, the velocity there and, of a solver of second
    order, the prediction before; ``clean`` is then the predicted result. ``predicted`` ``[B, T, ...]``: the clean
    results predicted before each recorded action, where they are to be scored, until they are decoded.
    """

    clean: torch.Tensor
    states: torch.Tensor | None = None
    actions: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    paused: torch.Tensor | None = None
    predicted: torch.Tensor | None = None

    def rows(self, index: Sequence[int]) -> Self:
        return replace(super().rows(index), **{name: picked(c, index) for name, c in self._columns()})

    def _joined(self, parts: Sequence[Any]) -> Self:
        import torch

        columns = {n: torch.cat([getattr(p, n) for p in parts]) for n, _ in self._columns()}
        return replace(super()._joined(parts), **columns)

    def _columns(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that have a row per sample."""
        names = ("clean", "states", "log_probs", "paused", "predicted")
        found = {name: getattr(self, name) for name in names}
        return [(name, column) for name, column in found.items() if column is not None]


class Segment(NamedTuple):
    """``tokens[start:stop]`` of a row. The policy wrote them, or was told them: in the prompt, or later. A further
    ``prompt`` in a row begins a text of its own: nothing before it is read there."""

    start: int
    stop: int
    kind: Literal["prompt", "written", "told"]
    features: str | None = None
    """Names what the controller's feature store has of a prompt: its tokens, and its pictures and clips."""
    turn: int = 0


PerToken = Literal["tokens", "action_mask", "log_probs", "drawn_at"]
"""The columns of ``TextRows`` with an entry per token."""


@dataclass
class TextRows(Rows):
    """Rows of tokens, one behind another: ``R`` rows, ``N`` tokens in all.

    ``segments``: those of each row, without gaps; the first is its prompt. ``tokens`` ``[N]`` int64, media expanded.
    ``action_mask`` ``[N]`` bool: what a loss counts. ``truncated`` ``[R]`` bool: cut at the length limit. ``log_probs``
    ``[N]`` float32: of what was sampled, under the distribution it was drawn from, 0 elsewhere; None where the data
    gave the text. Of text drawn in parts: ``under_way`` ``[R]`` bool, to be gone on with; ``drawn_at`` ``[N]`` int64,
    the training step under whose weights each token was drawn.
    """

    segments: list[tuple[Segment, ...]]
    tokens: torch.Tensor
    action_mask: torch.Tensor
    truncated: torch.Tensor
    log_probs: torch.Tensor | None = None
    under_way: torch.Tensor | None = None
    drawn_at: torch.Tensor | None = None
    episodes: list[Episode] | None = None
    """What happened in each row, where the recipe has an environment."""
    hints: list[Mapping[str, torch.Tensor] | None] | None = None
    """What there is per token of each row's prompt with a hint, as its own teacher reads it; None for a row without."""

    @classmethod
    def answers(
        cls,
        slots: Sequence[Slot],
        ids: Sequence[SampleId],
        prompts: Sequence[tuple[str, torch.Tensor]],
        tokens: Sequence[torch.Tensor],
        truncated: torch.Tensor,
        log_probs: Sequence[torch.Tensor] | None = None,
        drawn_at: Sequence[torch.Tensor] | None = None,
        behind: Sequence[Sequence[Segment]] | None = None,
    ) -> TextRows:
        """``tokens`` ``[T_i]`` of each behind its prompt. ``prompts``: the key of each one's features and its tokens.
        ``behind``: the segments behind each prompt; None: all of it was written in one turn."""
        segments = [
            (Segment(0, len(asked), "prompt", key), Segment(len(asked), len(asked) + len(row), "written"))
            for (key, asked), row in zip(prompts, tokens, strict=True)
        ]
        if behind is not None:
            again = [
                [s._replace(features=of[0].features) if s.kind == "prompt" else s for s in more]
                for of, more in zip(segments, behind, strict=True)
            ]
            segments = [(of[0], *more) for of, more in zip(segments, again, strict=True)]
        made = cls(list(slots), list(ids), segments, _behind([p for _, p in prompts], tokens), truncated, truncated)
        made.action_mask = to_device(made._marked("written"), made.tokens.device)
        made.log_probs, made.drawn_at = made._column(log_probs), made._column(drawn_at)
        return made

    def _column(self, behind: Sequence[torch.Tensor] | None) -> torch.Tensor | None:
        """Values of what is behind each prompt, as a column with 0 for the prompts."""
        if behind is None:
            return None
        none = behind[0].new_zeros(max(self.prompts))
        return _behind([none[:n] for n in self.prompts], behind)

    def _marked(self, kind: str) -> torch.Tensor:
        import torch

        spans = [torch.full((s.stop - s.start,), s.kind == kind) for of in self.segments for s in of]
        return torch.cat(spans)

    @cached_property
    def offsets(self) -> list[int]:
        """Where each row begins, and where the last one ends: ``R + 1`` numbers."""
        return [0, *accumulate(self.lengths)]

    @cached_property
    def prompts(self) -> list[int]:
        """The number of tokens of each prompt."""
        return [of[0].stop for of in self.segments]

    @cached_property
    def responses(self) -> list[int]:
        """The number of tokens behind each prompt."""
        return [n - prompt for n, prompt in zip(self.lengths, self.prompts, strict=True)]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each row."""
        return [of[-1].stop for of in self.segments]

    @property
    def written(self) -> list[int]:
        """The number of tokens of each row that the policy wrote, or the data gave."""
        return [sum(s.stop - s.start for s in of if s.kind == "written") for of in self.segments]

    @property
    def features(self) -> list[str]:
        """Names the features of each prompt."""
        return [of[0].features or "" for of in self.segments]

    @property
    def width(self) -> int:
        """The tokens behind the prompt of the longest row, and at least 1: the ``T`` of ``padded``."""
        return max(1, *self.responses)

    def column(self, name: PerToken) -> torch.Tensor:
        """``[N]``. Raises ``TypeError`` where these rows have none."""
        found: torch.Tensor | None = getattr(self, name)
        if found is None:
            raise TypeError(f"these rows of text have no {name}")
        return found

    def padded(self, name: PerToken) -> torch.Tensor:
        """``[R, T]``: the part of a column that is behind each prompt, with 0 behind each row."""
        import torch

        column = self.column(name)
        return torch.cat([column, column.new_zeros(1)])[self._places]

    @property
    def inside(self) -> torch.Tensor:
        """``[R, T]`` bool: where ``padded`` has tokens."""
        return self._places < len(self.tokens)

    @cached_property
    def _places(self) -> torch.Tensor:
        """``[R, T]``: the place of each entry in a column, ``N`` for padding."""
        import torch

        step, n = torch.arange(self.width), torch.tensor(self.responses).unsqueeze(1)
        first = torch.tensor([at + p for at, p in zip(self.offsets, self.prompts, strict=False)]).unsqueeze(1)
        return to_device(torch.where(step < n, first + step, self.offsets[-1]), self.tokens.device)

    @cached_property
    def sequences(self) -> Self:
        """The rows as a model reads them, of the same tokens: a row with further prompts is several. These rows where
        none has any."""
        begins = [[n for n, s in enumerate(of) if s.kind == "prompt"] for of in self.segments]
        if all(len(of) == 1 for of in begins):
            return self
        segments, index = list[tuple[Segment, ...]](), list[int]()
        for row, (of, at) in enumerate(zip(self.segments, begins, strict=True)):
            for first, last in zip(at, [*at[1:], len(of)], strict=True):
                shift = of[first].start
                segments.append(tuple(s._replace(start=s.start - shift, stop=s.stop - shift) for s in of[first:last]))
                index.append(row)
        columns = {name: picked(column, index) for name, column, per_token in self._columns() if not per_token}
        played = None if self.episodes is None else [self.episodes[i] for i in index]
        slots, ids = [self.slots[i] for i in index], [self.ids[i] for i in index]
        return replace(self, slots=slots, ids=ids, segments=segments, episodes=played, **columns)

    def repeated(self, times: int) -> Self:
        """Each row so often in a row of its own: as many ``sequences``, all equal."""
        index = [i for i in range(len(self)) for _ in range(times)]
        whole, segments = self.rows(index), list[tuple[Segment, ...]]()
        for of in self.segments:
            shifts = range(0, times * of[-1].stop, of[-1].stop)
            segments.append(tuple(s._replace(start=s.start + at, stop=s.stop + at) for at in shifts for s in of))
        columns = {name: getattr(self, name) for name, _, per_token in self._columns() if not per_token}
        named = {"slots": self.slots, "ids": self.ids, "episodes": self.episodes}
        return replace(whole, segments=segments, **named, **columns)

    def rejoined(self, values: torch.Tensor) -> torch.Tensor:
        """``[R, T]``: ``values`` of the ``sequences``, in the layout of their ``padded``, in that of these rows."""
        import torch

        apart = self.sequences
        spans = zip(range(0, values.numel(), apart.width), apart.prompts, apart.responses, strict=True)
        parts = [torch.cat([torch.full((n,), values.numel()), torch.arange(at, at + m)]) for at, n, m in spans]
        place = to_device(torch.cat([*parts, torch.tensor([values.numel()])]), values.device)
        return torch.cat([values.flatten(), values.new_zeros(1)])[place[self._places]]

    def spoken(self) -> list[list[int]]:
        """The tokens behind each prompt. Waits for the device."""
        flat = self.tokens.tolist()
        return [flat[at + p : end] for at, p, end in zip(self.offsets, self.prompts, self.offsets[1:], strict=False)]

    def spelled(self, temperature: float) -> list[Tokens]:
        """The tokens of each row with its prompt; ``temperature``: of the policy. Waits for the device."""
        flat, out = self.tokens.tolist(), list[Tokens]()
        for at, end, of in zip(self.offsets, self.offsets[1:], self.segments, strict=False):
            written = tuple((s.start, s.stop) for s in of if s.kind == "written")
            begins = tuple(s.start for s in of if s.kind == "prompt")
            out.append(Tokens(tuple(flat[at:end]), written, begins, temperature))
        return out

    def rows(self, index: Sequence[int]) -> Self:
        import torch

        spans = [torch.arange(self.offsets[i], self.offsets[i + 1]) for i in index]
        at = to_device(torch.cat(spans), self.tokens.device)
        columns = {n: c[at] if per_token else picked(c, index) for n, c, per_token in self._columns()}
        played = None if self.episodes is None else [self.episodes[i] for i in index]
        hints = None if self.hints is None else [self.hints[i] for i in index]
        chosen = replace(super().rows(index), segments=[self.segments[i] for i in index], **columns)
        return replace(chosen, episodes=played, hints=hints)

    def behind(self, prompts: Sequence[torch.Tensor]) -> TextRows:
        """What is behind each prompt, behind others: the tokens ``[P_i]`` of each, whose features keep their names."""
        spoken = [row[n:] for row, n in zip(self.tokens.split(self.lengths), self.prompts, strict=True)]
        asked = list(zip(self.features, prompts, strict=True))
        return TextRows.answers(self.slots, self.ids, asked, spoken, self.truncated)

    def _joined(self, parts: Sequence[Any]) -> Self:
        import torch

        columns = {n: torch.cat([getattr(p, n) for p in parts]) for n, _, _ in self._columns()}
        played = None if self.episodes is None else [one for p in parts for one in p.episodes]
        hints = None if self.hints is None else [one for p in parts for one in p.hints]
        joined = replace(super()._joined(parts), segments=[of for p in parts for of in p.segments], **columns)
        return replace(joined, episodes=played, hints=hints)

    def _columns(self) -> list[tuple[str, torch.Tensor, bool]]:
        """Its tensors, and whether each has an entry per token, or one per row."""
        per_token = get_args(PerToken)
        found = [(name, getattr(self, name)) for name in (*per_token, "truncated", "under_way")]
        return [(name, column, name in per_token) for name, column in found if column is not None]


def text_rows(rows: Rows) -> TextRows:
    """``rows`` of tokens. The recipe's checks refuse to ask for others: raises ``TypeError``."""
    if not isinstance(rows, TextRows):
        raise TypeError(f"{type(rows).__name__} have no tokens")
    return rows


def denoised(rows: Rows) -> DenoisingRows:
    """``rows`` of pictures or clips. The recipe's checks refuse to ask for others: raises ``TypeError``."""
    if not isinstance(rows, DenoisingRows):
        raise TypeError(f"{type(rows).__name__} were not denoised")
    return rows


def _behind(prompts: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each row behind its prompt, one after another."""
    import torch

    return torch.cat([part for pair in zip(prompts, rows, strict=True) for part in pair])
