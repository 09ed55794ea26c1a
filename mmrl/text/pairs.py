"""Pairs of a better and a worse response: tokens, log-probs and scores, with both texts in one forward.

A prompt carries its pair in ``meta``, by the columns of TRL's preference data: ``chosen`` and ``rejected``, and perhaps
``margin`` (how much better, for reward models). A response follows the rendered prompt exactly as a sampled one would,
so that a prompt is encoded once for both texts and nothing here depends on how a template shows finished answers. TRL
renders the whole conversation; the tokens are the same wherever that begins with the rendered prompt.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmrl.config.schema import Recipe
from mmrl.controller.features import FeatureStore
from mmrl.errors import BadPromptError, UserError
from mmrl.pipelines.protocol import Weights
from mmrl.text.conditioner import Conditioner
from mmrl.text.features import key_of
from mmrl.trajectory import Prompt, Slot, Trajectory, Turn

TEXTS = ("chosen", "rejected")
_MARK = "ANSWER"


@dataclass(frozen=True)
class Pair:
    """``margin``: by how much the score of ``chosen`` should be higher at least; 0 says nothing."""

    chosen: str
    rejected: str
    margin: float = 0.0


class PairModel(Protocol):
    """What the pairs of a run ask of its pipeline."""

    recipe: Recipe
    policy: nn.Module
    conditioner: Conditioner
    features: FeatureStore
    device: torch.device
    context: int | None
    """The most tokens of a prompt and its response; None where the model says none."""

    def response_log_probs(self, trajectory: Trajectory, temperature: float) -> Tensor:
        """``[B, T]`` of the rows' tokens."""
        ...

    def response_scores(self, trajectory: Trajectory) -> Tensor:
        """``[B]`` float32."""
        ...


class Pairs:
    """Final class. The pairs of a run of ``pipeline``, which calls it.

    For DPO a response ends with the token that ends an answer; for a reward model with all that the chat template
    writes behind an answer. Raises ``UserError`` where the model is not of the kind that the algorithm trains.
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

        Raises ``BadPromptError`` where there is no pair, or one that cannot be trained on.
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
        """Tokens of each row: prompt and longer text, twice, as they lie in a forward."""
        features = self.pipeline.features
        prompts = [features.ref(key_of(s.prompt)).shapes["input_ids"][0] for s in trajectory.slots]
        texts = [features.ref(key_of_pair(s.prompt)).shapes for s in trajectory.slots]
        return [2 * (n + max(pair[name][0] for name in TEXTS)) for n, pair in zip(prompts, texts, strict=True)]

    def margins(self, trajectory: Trajectory) -> Tensor:
        """``[B]`` float32, 0 where the data gives none."""
        values = [pair_of(slot.prompt).margin for slot in trajectory.slots]
        return torch.tensor(values, device=self.pipeline.device)

    def compare(self, trajectory: Trajectory, needs: frozenset[str], weights: Weights) -> dict[str, Tensor]:
        """What is needed of chosen_log_probs, rejected_log_probs, the same of the reference without a graph, and
        chosen_scores, rejected_scores: ``[B]`` float32 each. Log-probs are summed over the text and its end, whose
        tokens are counted by chosen_tokens and rejected_tokens."""
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
        """``[2 B]``, of the model at temperature 1, whatever samples are drawn at."""
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
                f"it has no meta[{name!r}], and pairs are what is trained on; of a jsonl file name the columns with "
                "data.train.meta=[chosen, rejected]",
            )
        try:
            texts.append(_text_of(prompt.meta[name], prompt))
        except ValueError as error:
            raise BadPromptError(prompt.id, f"meta[{name!r}] {error}; give the response's text") from None
    if texts[0] == texts[1]:
        raise BadPromptError(prompt.id, "its two responses are the same, and none is the better; take it out")
    margin = prompt.meta.get("margin")
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float)):
        raise BadPromptError(prompt.id, f"meta['margin'] is {margin!r}; give a number, or none")
    if margin is not None and not math.isfinite(margin):
        raise BadPromptError(prompt.id, f"meta['margin'] is {margin}; give a finite number, or none")
    return Pair(texts[0], texts[1], float(margin or 0.0))


def key_of_pair(prompt: Prompt) -> str:
    """Names the tokens of a prompt's pair in the feature store: equal for equal texts behind an equal prompt."""
    said = repr((prompt.meta.get("chosen"), prompt.meta.get("rejected")))
    return f"{key_of(prompt)}/pair/{hashlib.blake2b(said.encode(), digest_size=12).hexdigest()}"


def response_tokens(conditioner: Conditioner, text: str) -> list[int]:
    """The tokens of ``text`` as a response. Raises ``ValueError`` where it has tokens that no response can have."""
    tokenizer = getattr(conditioner.saved, "tokenizer", conditioner.saved)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    wrong = sorted({*tokens} & {*conditioner.stop_tokens, *conditioner.forbidden})
    if wrong:
        raise ValueError(f"contains the control token {tokenizer.decode(wrong[:1])!r}")
    return tokens


def ending(conditioner: Conditioner) -> list[int]:
    """The tokens that the chat template writes behind an answer; a token that ends text is among them."""
    saved = conditioner.saved
    tokenizer = getattr(saved, "tokenizer", saved)

    def content(text: str) -> Any:
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


def _text_of(said: Any, prompt: Prompt) -> str:
    """A response: its text, or messages of which it is the last. Raises ``ValueError``."""
    if isinstance(said, str):
        return said
    if not isinstance(said, Sequence) or not said or not all(isinstance(m, Mapping) for m in said):
        raise ValueError(f"is a {type(said).__name__}, neither text nor messages")
    if said[-1].get("role") != "assistant":
        raise ValueError("ends with no message of the assistant")
    before = [m for m in said[:-1] if m.get("role") != "system"]
    asked = [*prompt.turns, Turn("user", prompt.text)]
    if before and len(before) != len(asked):
        raise ValueError(
            f"has {len(before)} messages before its answer, and the prompt {len(asked)}; a response is one message"
        )
    if any(_differs(message, turn) for message, turn in zip(before, asked, strict=False)):
        raise ValueError("answers another message of the user than the prompt's, or another conversation")
    return _content(said[-1])


def _differs(message: Mapping[str, Any], turn: Turn) -> bool:
    content = message.get("content")
    same = not isinstance(content, str) or content.replace("\r\n", "\n").strip() == turn.text
    return message.get("role") != turn.role or not same


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError("has a message without content")
    texts = [p["text"] for p in content if isinstance(p, Mapping) and isinstance(p.get("text"), str)]
    if len(texts) < len(content):
        raise ValueError("has a message whose content is not text")
    return "".join(texts)
