"""The protocol of a rollout engine: prompts in, sampled tokens with their log-probs out.

Without an engine the training process samples with the training weights (``mmrl.families.text.pipeline``). Engines
(vLLM, SGLang) have their own weights, which ``update`` replaces after every optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from PIL.Image import Image
from torch import Tensor

from mmrl.core.json_types import JsonObject
from mmrl.core.media import Clip


@dataclass(frozen=True)
class Request:
    """One sample to draw.

    ``prompt_ids``: the prompt with every media placeholder expanded as the trainer's processor did.
    ``unexpanded_ids``: the prompt before that expansion, one placeholder per medium, for engines that preprocess
    ``media`` themselves, which lie in the order of their placeholders. They are the ids that were made of the prompt or
    sampled, so that no text is tokenised again; empty where the prompt has no media.
    ``text``: the same as text, for an engine that takes no ids beside pictures, and for messages; empty where parts of
    the prompt were sampled, because their text may have other ids. ``features``: what the trainer's processor made of
    the prompt, for sampling in the process. ``seed`` is the sample's own, or None for vLLM and SGLang to draw without
    one (``rollout.reproducible: false``). ``partial``: tokens that were already sampled, of a response that is
    continued; the tokens after them are drawn with another seed. ``name``: of the sample, for messages.
    ``max_new_tokens``: the limit of the prompt, if it has one below ``Settings.max_new_tokens``.
    ``extra``: further sampling parameters by the engine's own names.
    """

    prompt_ids: Sequence[int]
    text: str
    seed: int | None
    media: Sequence[Image | Clip] = ()
    partial: Sequence[int] = ()
    name: str = ""
    max_new_tokens: int | None = None
    extra: JsonObject = field(default_factory=dict)
    unexpanded_ids: Sequence[int] = ()
    features: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def images(self) -> list[Image]:
        return [medium for medium in self.media if not isinstance(medium, Clip)]

    @property
    def clips(self) -> list[Clip]:
        return [medium for medium in self.media if isinstance(medium, Clip)]


@dataclass(frozen=True)
class Completion:
    """``token_ids`` after the prompt (and after ``partial``), with the end-of-text token if it was drawn;
    ``log_probs`` of each under the distribution it was drawn from; ``finish``: ``stop``, ``length``, or ``cut`` if
    ``Settings.cut_after`` ended it. ``prompt_tokens``: how many prompt tokens the engine
    saw, ``partial`` not counted."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish: Literal["stop", "length", "cut"]
    prompt_tokens: int


@dataclass(frozen=True)
class Settings:
    """How to sample. ``temperature`` 0 is greedy. ``top_k`` None and ``top_p`` 1 do not narrow the distribution.

    ``max_new_tokens`` is the limit of a sample, with ``Request.partial``; ``cut_after`` limits the tokens that one call
    draws for it. Only ``stop_token_ids`` and the texts ``stop`` end a sample; the model's own stop tokens do not. A
    text ends it with the token that completes the text; the tokens that an engine draws after it are cut. Neither ends
    a sample within its first ``min_new_tokens``. ``repetition_penalty`` counts the tokens of prompt and response. A
    user's own class names in ``understands`` which of ``min_new_tokens``, ``repetition_penalty`` and ``min_p`` it
    obeys.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: Sequence[int] = field(default_factory=tuple)
    cut_after: int | None = None
    stop: Sequence[str] = ()
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    min_p: float = 0.0


class RolloutEngine(Protocol):
    """Abstract. An engine with its own weights. All methods raise ``UserError``, with the edit that mends it."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and response together."""
        ...

    @property
    def sleeps(self) -> bool:
        """Whether ``sleep`` frees memory; otherwise the engine must be closed to free it."""
        ...

    def generate(self, requests: Sequence[Request], settings: Settings) -> list[Completion]:
        """One completion per request, in their order."""
        ...

    def update(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace the weights by the named Hugging Face tensors (all of them), and forget cached prefixes."""
        ...

    def update_lora(self, tensors: Mapping[str, Tensor], rank: int, alpha: float, targets: Sequence[str]) -> None:
        """Replace the adapter (names as peft saves them), and forget cached prefixes."""
        ...

    def sleep(self) -> None:
        """Free the memory that the platform allows to free; ``wake`` and ``update`` before the next ``generate``."""
        ...

    def wake(self) -> bool | None:
        """Allocate memory for the weights again; other memory may be allocated by the ``update`` after it."""
        ...

    def close(self) -> None:
        """Free the engine, its processes and files. Harmless when called twice."""
        ...


@runtime_checkable
class ReportsMetrics(Protocol):
    """Abstract. What an engine may have besides: numbers for ``metrics.jsonl``."""

    def metrics(self) -> Mapping[str, float]:
        """Numbers by name, logged after every step as ``engine/<name>``. Each is logged as it is: reset what counts one
        step. Asked while the engine is awake, after the samples of a step are drawn, and before it sleeps."""
        ...


@runtime_checkable
class AnswersAsItGoes(Protocol):
    """Abstract. What an engine may have besides ``generate``: requests are answered one by one, and new ones may come
    while others are under way. For one thread at a time.

    A sample depends on its request, the settings and the weights, whatever is sampled beside it and in whatever order.
    While requests are under way, ``generate``, ``update``, ``update_lora`` and ``sleep`` raise ``UserError``.
    """

    def submit(self, request: Request, settings: Settings) -> int:
        """Begin with a request; returns its id. Raises ``UserError`` where it cannot be answered."""
        ...

    def ready(self, timeout: float | None) -> list[tuple[int, Completion]]:
        """What was answered since the last call, by id; waits ``timeout`` seconds for the first answer, None for as
        long as it takes, and not at all where no request is under way. An engine in this process computes meanwhile, at
        least one token.

        Raises ``UserError`` where an answer is wrong or the engine is lost; no request is under way afterwards.
        """
        ...

    def cancel(self, id: int) -> None:
        """End a request without an answer. Raises ``UserError`` where no such request is under way."""
        ...
