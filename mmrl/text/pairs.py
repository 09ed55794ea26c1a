"""Pairs of a better and a worse response: tokens, log-probs and scores, with both texts in one forward.

A prompt has its pair in ``meta``, with the column names of TRL's preference data: ``chosen``, ``rejected`` and, for
reward models, optionally ``margin`` (by how much ``chosen`` is better). The tokens of a response follow those of the
rendered prompt, as in sampling. A prompt is therefore encoded once for both texts, and the way in which a template
shows earlier answers plays no role. TRL renders the whole conversation; the tokens are the same if its rendering begins
with the rendered prompt.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mmrl.config.schema import Recipe
from mmrl.controller.features import FeatureStore
from mmrl.errors import BadPromptError, UserError
from mmrl.json_types import Json, JsonObject
from mmrl.pipelines.protocol import Weights
from mmrl.text.conditioner import Conditioner, tokenizer_of
from mmrl.text.features import key_of
from mmrl.trajectory import Prompt, Slot, Trajectory

TEXTS = ("chosen", "rejected")
_MARK = "ANSWER"


@dataclass(frozen=True)
class Pair:
    """``margin``: the score of ``chosen`` should be higher by at least this; 0 without a margin."""

    chosen: str
    rejected: str
    margin: float = 0.0


class PairModel(Protocol):
    """The part of a pipeline that ``Pairs`` uses."""

    recipe: Recipe
    policy: nn.Module
    conditioner: Conditioner
    features: FeatureStore
    device: torch.device
    context: int | None
    """The most tokens of a prompt and its response; None if the model has no limit."""

    def response_log_probs(self, trajectory: Trajectory, temperature: float) -> Tensor:
        """``[B, T]`` of the rows' tokens."""
        ...

    def response_scores(self, trajectory: Trajectory) -> Tensor:
        """``[B]`` float32."""
        ...


class Pairs:
    """Final class. Encodes and compares the pairs of a run, for its ``pipeline``.

    For DPO a response ends with the stop token; for a reward model with all tokens that the chat template writes after
    an answer. Raises ``UserError`` if the algorithm does not train this kind of model.
    """

    def __init__(self, pipeline: PairModel) -> None:
        self.pipeline = pipeline
        self.scores = pipeline.recipe.algorithm.trains_scores
        if self.scores and not hasattr(pipeline.policy, "score"):
            raise UserError(
                f"pipeline: {pipeline.recipe.pipeline} writes text, and {pipeline.recipe.algorithm.label} trains a "
                "score; set pipeline: llm/score (vlm/score for prompts with pictures)"
            )
        whole, stops = ending(pipeline.conditioner), pipeline.conditioner.stop_tokens
        self.ending = whole if self.scores else [next(token for token in whole if token in stops)]

    def encoded(self, prompt: Prompt, length: int) -> dict[str, Tensor]:
        """The tokens of both texts, ``chosen`` and ``rejected``, on the CPU; ``length``: tokens of the prompt.

        Raises ``BadPromptError`` if there is no pair, or a pair that cannot be trained on.
        """
        pair, conditioner = pair_of(prompt), self.pipeline.conditioner
        out: dict[str, Tensor] = {}
        for name, text in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            try:
                tokens = response_tokens(conditioner, text)
            except ValueError as error:
                raise BadPromptError(prompt.id, f"meta[{name!r}] {error}; mend the pair or take it out") from None
            out[name] = torch.tensor([*tokens, *self.ending])
            most, n = self.pipeline.context, length + len(out[name])
            if most is not None and n > most:
                raise BadPromptError(
                    prompt.id,
                    f"with meta[{name!r}] it has {n} tokens, and the model's context {most}; shorten it or take it out",
                )
        return out

    def lengths(self, trajectory: Trajectory) -> list[int]:
        """Tokens of each row in a forward: prompt and longer text, times two."""
        features = self.pipeline.features
        prompts = [features.ref(key_of(s.prompt)).shapes["input_ids"][0] for s in trajectory.slots]
        texts = [features.ref(key_of_pair(s.prompt)).shapes for s in trajectory.slots]
        return [2 * (n + max(pair[name][0] for name in TEXTS)) for n, pair in zip(prompts, texts, strict=True)]

    def margins(self, trajectory: Trajectory) -> Tensor:
        """``[B]`` float32, 0 for a pair without a margin."""
        values = [pair_of(slot.prompt).margin for slot in trajectory.slots]
        return torch.tensor(values, device=self.pipeline.device)

    def compare(self, trajectory: Trajectory, needs: frozenset[str], weights: Weights) -> dict[str, Tensor]:
        """Compute what is in ``needs``, ``[B]`` float32 each.

        chosen_log_probs and rejected_log_probs are summed over the tokens of the text and its end;
        reference_chosen_log_probs and reference_rejected_log_probs, without a graph, also. chosen_tokens and
        rejected_tokens count these tokens. A reward model has chosen_scores and rejected_scores."""
        both = self._both(trajectory.slots)
        if self.scores:
            return _halves("scores", self.pipeline.response_scores(both))
        out = _halves("log_probs", self._log_probs(both))
        if "chosen_tokens" in needs:
            assert both.mask is not None
            out |= _halves("tokens", both.mask.sum(1))
        if any(name.startswith("reference_") for name in needs):
            with torch.no_grad(), weights("reference"):
                out |= {f"reference_{k}": v for k, v in _halves("log_probs", self._log_probs(both)).items()}
        return out

    def _both(self, slots: Sequence[Slot]) -> Trajectory:
        """``2 B`` rows: the chosen texts, then the rejected ones."""
        pairs = [self.pipeline.features.get(key_of_pair(slot.prompt)) for slot in slots]
        texts = [pair[name] for name in TEXTS for pair in pairs]
        tokens, mask = stacked(texts, self.pipeline.conditioner.pad_token, self.pipeline.device)
        keys = [key_of(slot.prompt) for slot in slots]
        return Trajectory([*slots, *slots], [], tokens, [*keys, *keys], mask=mask)

    def _log_probs(self, both: Trajectory) -> Tensor:
        """``[2 B]``, at temperature 1, whatever the temperature of sampling is."""
        per_token = self.pipeline.response_log_probs(both, 1.0)
        assert both.mask is not None
        return (per_token * both.mask).sum(1)


def pair_of(prompt: Prompt) -> Pair:
    """The pair in ``prompt.meta``. Raises ``BadPromptError`` where there is none."""
    texts = []
    for name in TEXTS:
        if name not in prompt.meta:
            raise BadPromptError(
                prompt.id,
                f"it has no meta[{name!r}], and the algorithm trains on pairs; for a jsonl file name the columns with "
                "data.train.meta=[chosen, rejected]",
            )
        try:
            texts.append(_text_of(prompt.meta[name], prompt))
        except ValueError as error:
            raise BadPromptError(prompt.id, f"meta[{name!r}] {error}; give the response's text") from None
    if texts[0] == texts[1]:
        raise BadPromptError(prompt.id, "its two responses are equal, so that neither is better; take it out")
    margin = prompt.meta.get("margin")
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float)):
        raise BadPromptError(prompt.id, f"meta['margin'] is {margin!r}; give a number, or none")
    if margin is not None and not math.isfinite(margin):
        raise BadPromptError(prompt.id, f"meta['margin'] is {margin}; give a finite number, or none")
    return Pair(texts[0], texts[1], float(margin or 0.0))


def key_of_pair(prompt: Prompt) -> str:
    """The key of a pair's tokens in the feature store: equal for equal texts after an equal prompt."""
    texts = repr((prompt.meta.get("chosen"), prompt.meta.get("rejected")))
    return f"{key_of(prompt)}/pair/{hashlib.blake2b(texts.encode(), digest_size=12).hexdigest()}"


def response_tokens(conditioner: Conditioner, text: str) -> list[int]:
    """The tokens of ``text`` as a response. Raises ``ValueError`` if it has a token that no response can have."""
    tokenizer = tokenizer_of(conditioner.saved)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    wrong = sorted({*tokens} & {*conditioner.stop_tokens, *conditioner.forbidden})
    if wrong:
        raise ValueError(f"contains the control token {tokenizer.decode(wrong[:1])!r}")
    return tokens


def ending(conditioner: Conditioner) -> list[int]:
    """The tokens that the chat template writes after an answer; a stop token is one of them."""
    saved = conditioner.saved
    tokenizer = tokenizer_of(saved)

    def content(text: str) -> str | list[dict[str, str]]:
        return [{"type": "text", "text": text}] if tokenizer is not saved else text

    messages = [{"role": "user", "content": content("Hi")}, {"role": "assistant", "content": content(_MARK)}]
    variables = getattr(conditioner, "variables", {})
    behind = saved.apply_chat_template(messages, tokenize=False, **variables).rpartition(_MARK)[2]
    tokens = tokenizer(behind, add_special_tokens=False).input_ids
    if not {*tokens} & {*conditioner.stop_tokens}:
        tokens = [tokenizer.eos_token_id if tokenizer.eos_token_id is not None else conditioner.stop_tokens[0], *tokens]
    return tokens


def stacked(texts: Sequence[Tensor], pad_token: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Tokens and mask ``[B, T]`` of texts ``[T_i]``, padded on the right."""
    tokens = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=pad_token)
    lengths = torch.tensor([len(text) for text in texts])
    mask = (torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)).float()
    return tokens.to(device), mask.to(device)


def _halves(name: str, both: Tensor) -> dict[str, Tensor]:
    chosen, rejected = both.chunk(2)
    return {f"chosen_{name}": chosen, f"rejected_{name}": rejected}


def _text_of(response: Json, prompt: Prompt) -> str:
    """The text of a response: a string, or messages with the response as the last. Raises ``ValueError``."""
    if isinstance(response, str):
        return response
    messages = [m for m in response if isinstance(m, Mapping)] if isinstance(response, Sequence) else []
    if not isinstance(response, Sequence) or not messages or len(messages) < len(response):
        raise ValueError(f"is a {type(response).__name__}, neither text nor messages")
    if messages[-1].get("role") != "assistant":
        raise ValueError("does not end with a message of the assistant")
    others = [m for m in messages[:-1] if m.get("role") != "system"]
    if [m.get("role") for m in others] not in ([], ["user"]):
        raise ValueError("has a conversation of several turns; only one turn is supported")
    asked = others[0].get("content") if others else None
    if isinstance(asked, str) and asked.replace("\r\n", "\n").strip() != prompt.text:
        raise ValueError("answers another message of the user than the prompt's")
    return _content(messages[-1])


def _content(message: JsonObject) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError("has a message without content")
    texts = [text for p in content if isinstance(p, Mapping) and isinstance(text := p.get("text"), str)]
    if len(texts) < len(content):
        raise ValueError("has a message whose content is not text")
    return "".join(texts)
