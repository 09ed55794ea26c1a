"""The protocol of a rollout engine: prompts in, sampled tokens with their log-probs out.

The default samples in the training process with the training weights (``mmrl.engines.generation``). The others (vLLM,
SGLang) hold weights of their own, which ``update`` replaces after every optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from PIL.Image import Image
from torch import Tensor

from mmrl.media import Clip


@dataclass(frozen=True)
class Request:
    """One sample to draw.

    ``prompt_ids``: the prompt with every media placeholder expanded as the trainer's processor did. ``text`` is the
    prompt before that expansion (one placeholder per medium), for engines that preprocess media themselves.
    ``seed`` is the sample's own. ``partial``: tokens already sampled (a generation that was cut and goes on); what
    follows them is drawn with a seed of its own. ``name``: what messages call the sample. ``max_new_tokens``: where the
    prompt has a limit of its own, below ``Settings.max_new_tokens``. ``extra``: further sampling parameters by the
    engine's own names.
    """

    prompt_ids: Sequence[int]
    text: str
    seed: int
    images: Sequence[Image] = ()
    clips: Sequence[Clip] = ()
    partial: Sequence[int] = ()
    name: str = ""
    max_new_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """``token_ids`` after the prompt (and after ``partial``), the end-of-text token included where it was drawn;
    ``log_probs`` of each under the distribution it was drawn from; ``finish``: ``stop``, ``length``, or ``cut`` where
    the engine was told to stop early (``Settings.cut_after``). ``prompt_tokens``: how many prompt tokens the engine
    saw, ``partial`` not counted."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish: Literal["stop", "length", "cut"]
    prompt_tokens: int


@dataclass(frozen=True)
class Settings:
    """How to sample. ``temperature`` 0 is greedy. ``top_k`` None and ``top_p`` 1 leave the distribution whole.

    ``max_new_tokens`` is a sample's whole budget, ``Request.partial`` included; ``cut_after`` bounds the tokens that
    one call draws for it. Only ``stop_token_ids`` and the texts ``stop`` end a sample, the latter with the token that
    completes one (what an engine draws beyond is cut): an engine adds none of the model's own. Neither ends one within
    its first ``min_new_tokens``. ``repetition_penalty`` is of prompt and response. A class of a user's own names which
    of ``min_new_tokens``, ``repetition_penalty`` and ``min_p`` it obeys, in ``understands``.
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
    """Abstract. An engine with weights of its own; everything raises ``UserError`` with the edit that mends it."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and response together that the engine can hold."""
        ...

    @property
    def sleeps(self) -> bool:
        """Whether ``sleep`` gives memory back; where it does not, an engine must be closed for that."""
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
        """Give back what memory the platform allows; ``wake`` and ``update`` before the next ``generate``."""
        ...

    def wake(self) -> Any:
        """Have memory for the weights again; what else it needs to sample may come with the ``update`` after it."""
        ...

    def close(self) -> None:
        """Free the engine, its processes and files. Harmless when called twice."""
        ...
