"""Shared code of engines with their own weights: limits of a request, counts of an update, and adapters.

``VllmEngine``, ``VllmServer`` and ``SglangServer`` differ in how a request is sent. Its limits, and the checks of the
answer, are the same for all and are here; ``mmrl.inference.weighted_engine`` is their base class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.hub_files import folder_of, json_of
from mmrl.core.json_types import JsonObject
from mmrl.core.randomness import seed_of
from mmrl.core.rollout_engine import Completion, Request, Settings
from mmrl.core.tensor_files import header

_SEEDS = 2**31
"""Of an engine."""
_EXTRA = 1e-3
"""The share of a checkpoint's values that an update may lack (buffers that are saved and not trained)."""


@dataclass(frozen=True)
class Allowance:
    """What one call draws for a request: at most ``tokens``, at least ``least``; ``at_end``: the reason to finish after
    ``tokens``. ``extra``: see ``Request``."""

    tokens: int
    at_end: Literal["length", "cut"]
    seed: int | None
    least: int = 0
    extra: JsonObject = field(default_factory=dict)


def allowances(requests: Sequence[Request], settings: Settings, max_model_len: int) -> list[Allowance]:
    """How many tokens each request may draw. Raises ``UserError`` if a prompt fills the context."""
    long = [i for i, r in enumerate(requests) if len(r.prompt_ids) >= max_model_len]
    if long:
        first = requests[long[0]]
        raise UserError(
            f"{len(long)} of {len(requests)} prompts do not fit the engine's context of {max_model_len} tokens; the "
            f"first is {label(first, long[0])} with {len(first.prompt_ids)}: shorten or leave out such prompts, or "
            "raise max_model_len"
        )
    return [_allowance(r, settings, max_model_len) for r in requests]


def _allowance(request: Request, settings: Settings, max_model_len: int) -> Allowance:
    done = len(request.partial)
    most = min(settings.max_new_tokens, request.max_new_tokens or settings.max_new_tokens)
    left = max(min(most, max_model_len - len(request.prompt_ids)) - done, 0)
    least = max(settings.min_new_tokens - done, 0)
    seed = None if request.seed is None else request.seed % _SEEDS
    if seed is not None and done:  # it needs other random numbers than the first tokens
        seed = seed_of(seed, "resumed", done)
    if settings.cut_after is not None and settings.cut_after < left:
        return Allowance(settings.cut_after, "cut", seed, min(least, settings.cut_after), request.extra)
    return Allowance(left, "length", seed, min(least, left), request.extra)


def completion(
    request: Request,
    allowance: Allowance,
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    finish: str | None,
    prompt_tokens: int,
    engine: str,
) -> Completion:
    """Check the answer of ``engine``. ``prompt_tokens`` as it counts them, with ``partial``."""
    if finish not in ("stop", "length") or len(token_ids) != len(log_probs):
        raise UserError(
            f"{engine} ended sample {label(request)} with {finish!r}, {len(token_ids)} tokens and {len(log_probs)} "
            "log-probs; its own log says why"
        )
    if not all(math.isfinite(p) and p > -1000 for p in log_probs):  # vLLM's server sends -9999 for what is not a number
        raise UserError(
            f"{engine} gave sample {label(request)} a log-prob that is not a number: the weights it was sent are not "
            "finite. Look at grad_norm and loss of the last updates, and lower optim.lr"
        )
    ended = "stop" if finish == "stop" else allowance.at_end
    return Completion(list(token_ids), list(log_probs), ended, prompt_tokens - len(request.partial))


def nothing_left(request: Request) -> Completion:
    """The answer for a request whose tokens are used up."""
    return Completion([], [], "length", len(request.prompt_ids))


def check_prompt(request: Request, seen: Sequence[int], engine: str) -> None:
    """Raise ``UserError`` unless ``engine`` and trainer expanded the prompt's placeholders to the same tokens."""
    meant = [*request.prompt_ids, *request.partial]
    if list(seen) == meant:
        return
    at = next((i for i, (a, b) in enumerate(zip(seen, meant, strict=False)) if a != b), min(len(seen), len(meant)))
    raise UserError(
        f"{engine} made {len(seen) - len(request.partial)} tokens of the prompt of sample {label(request)}, the "
        f"trainer's processor {len(request.prompt_ids)} (they part at token {at}): both must expand pictures and clips "
        "alike. Give the engine the trainer's processor settings (mm_processor_kwargs in the engine's options), or use "
        "the same transformers version"
    )


def check_count(request: Request, seen: int, engine: str) -> None:
    """``check_prompt`` for an engine that tells only the number of tokens, ``partial`` included."""
    if seen == len(request.prompt_ids) + len(request.partial):
        return
    raise UserError(
        f"{engine} made {seen - len(request.partial)} tokens of the prompt of sample {label(request)}, the trainer's "
        f"processor {len(request.prompt_ids)}: both must expand pictures alike. Give the engine the trainer's "
        "processor settings, or use the same transformers version"
    )


def check_rank(rank: int, largest: int | None) -> None:
    """Raise ``UserError`` if an engine that was started for adapters up to ``largest`` cannot take ``rank``."""
    if largest is None or rank > largest:
        limit = "without adapters" if largest is None else f"for adapters of rank {largest} at most"
        raise UserError(f"the rollout engine was started {limit}; start it with lora_rank={rank}")


def label(request: Request, index: int | None = None) -> str:
    """The name of a request in messages."""
    start = " ".join(request.text.split())[:60]
    name = request.name or (f"{index}" if index is not None else "")
    return f"{name} ({start!r})" if name and start else name or repr(start)


class Counted:
    """Final class. Yields named weights and counts their values."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights, self.values, self.tensors = weights, 0, 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            self.values += tensor.numel()
            self.tensors += 1
            yield name, tensor.detach()

    def check(self, expected: int, engine: str) -> None:
        """Raise ``UserError`` if fewer values came than the model has: the others would keep their old values."""
        if self.values < expected * (1 - _EXTRA):
            raise UserError(
                f"an update brought {self.values:,} values in {self.tensors} tensors for {engine}, and its model has "
                f"{expected:,}: send every weight by its Hugging Face name, trained or not"
            )


def values_of(model: Path) -> int:
    """How many values the safetensors files of ``model`` have, without weights that its config ties to others."""
    total, tied = 0, 0
    for file in sorted(model.glob("*.safetensors")):
        for name, stored in header(file).items():
            total += math.prod(stored.shape)
            tied += math.prod(stored.shape) if name.endswith("lm_head.weight") else 0
    config = json_of(str(model), "config.json")
    text = config.get("text_config", {})
    ties = config.get("tie_word_embeddings") or (isinstance(text, Mapping) and text.get("tie_word_embeddings"))
    return total - tied if ties else total


def model_folder(path: str, engine: str) -> Path:
    """The directory of a Hugging Face model; for a hub name, the directory in the hub's cache with the weights that the
    trainer loads. Raises ``UserError`` if there is none, or if it has no config."""
    try:
        folder = folder_of(path)
    except OSError as error:
        raise UserError(
            f"{engine}: there is no model directory {path}, and as a name of the hub it cannot be used ({error}); set "
            "model.path to a Hugging Face directory, or go online once"
        ) from error
    if not folder.is_dir():
        raise UserError(f"{engine}: {path} is no directory; set model.path to a Hugging Face directory")
    if not (folder / "config.json").is_file():
        raise UserError(f"{engine}: {path} has no config.json; set model.path to a whole Hugging Face directory")
    return folder


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Write a LoRA to the new ``folder`` as peft does. ``tensors`` by the names peft saves."""
    folder.mkdir(mode=0o700)
    # Copies with their own memory: safetensors refuses tensors that share memory, and partial views.
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        save_file(own, folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        raise UserError(
            f"weights for the rollout engine could not be written to {folder}: {error}. Free some of that disk, or "
            "set TMPDIR to another"
        ) from error
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
