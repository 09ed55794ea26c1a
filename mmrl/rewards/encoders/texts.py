"""A language or vision-language model reads an answer behind its prompt, without writing: one forward of both.

Its states at the end of the prompt nearly know its own answer; those at the tokens of the given answer say what it
makes of that one, as does the log-probability that it gives to each token. The model is the one of the recipe, before
training, and is frozen; a LoRA adapter on it may be trained (``mmrl.rewards.learned.distilled.encoders``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.media import Media
from mmrl.core.media.images import png_bytes
from mmrl.core.trajectory import Prompt
from mmrl.families.text.pipeline import LanguagePipeline
from mmrl.models.text.answered import ending
from mmrl.models.text.base_model import base_model
from mmrl.models.text.conditioner import tokenizer_of
from mmrl.models.text.features import as_weights, joined, key_of
from mmrl.models.text.given import stacked
from mmrl.models.text.likelihood import token_log_probs
from mmrl.rewards.encoders.described import opened

_AT_ONCE = 8192
"""Tokens in one forward."""
_ROWS = 64


@dataclass(frozen=True)
class States:
    """The states of ``B`` answers: ``before`` ``[B, D]``, the states at the last token of the prompt, of several layers
    one behind the other; ``answers`` ``[B, T, D]``, those at each token of the answer and at the one that ends it;
    ``log_probs`` ``[B, T]`` of these tokens; ``mask`` ``[B, T]``, 1 where there is a token."""

    before: Tensor
    answers: Tensor
    log_probs: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Question:
    """A prompt: its text, with the placeholders of its pictures."""

    text: str
    pictures: tuple[Image.Image, ...] = ()


@dataclass(frozen=True)
class Asked:
    """An answer to read: the ``key`` and the ``features`` of its prompt, and its tokens."""

    key: str
    features: Mapping[str, Tensor]
    tokens: Tensor

    def __len__(self) -> int:
        return len(self.features["input_ids"]) + len(self.tokens)


class TextReader:
    """Opens the model that ``described`` kept. ``what`` it does and the command to run ``again`` are for messages.

    A system message and earlier turns are read as parts of one message, as ``Prompt.conversation`` writes them. Raises
    ``UserError`` where the model is not there any more.
    """

    def __init__(self, model: JsonObject, what: str, again: str) -> None:
        recipe, path = opened(model, what, again)
        pipeline = mmrl.load("pipelines", recipe.pipeline).build(recipe, path, torch.device("cpu"))
        if not isinstance(pipeline, LanguagePipeline) or not base_model(pipeline.policy).can_generate():
            raise UserError(f"the model that {what} does not write, so it cannot read answers")
        self.pipeline, self.model = pipeline, base_model(pipeline.policy)
        head = self.model.get_output_embeddings()
        assert head is not None  # it can generate
        self.head = head
        self._adapter = {name for name, of in pipeline.policy.named_parameters() if of.requires_grad}
        self.model.eval().requires_grad_(False)
        chat = pipeline.conditioner
        self.end = [token for token in ending(chat) if token in chat.stop_tokens][:1]
        self.device = torch.device("cpu")

    @property
    def modules(self) -> nn.ModuleList:
        """All that computes."""
        return nn.ModuleList([self.model])

    def at(self, device: torch.device | str) -> None:
        """Read on ``device`` from now on, where ``modules`` are."""
        self.device = torch.device(device)

    @property
    def adapter(self) -> dict[str, nn.Parameter]:
        """The weights of its LoRA adapter, which has no effect before it is trained."""
        return {name: of for name, of in self.pipeline.policy.named_parameters() if name in self._adapter}

    def asked(self, questions: Sequence[Question], of_question: Sequence[int], answers: Sequence[str]) -> list[Asked]:
        """What the model is given for answers, each to ``questions[of_question[n]]``. Raises ``BadPromptError`` for a
        prompt that it cannot read."""
        prompts = [_prompt(n, question) for n, question in enumerate(questions)]
        limit = self.pipeline.limit
        features = [self.pipeline.fitter.encode(prompt, limit)[1] for prompt in prompts]
        return [
            Asked(key_of(prompts[n]), features[n], self._tokens(text, len(features[n]["input_ids"])))
            for n, text in zip(of_question, answers, strict=True)
        ]

    @torch.no_grad()
    def states(self, asked: Sequence[Asked]) -> States:
        """The states of answers, on the CPU."""
        size = max(1, min(_ROWS, _AT_ONCE // max(map(len, asked))))
        parts = [self.forward(asked[first : first + size]) for first in range(0, len(asked), size)]
        columns = zip(*((one.before, one.answers, one.log_probs, one.mask) for one in parts), strict=True)
        before, states, log_probs, mask = ([one.cpu() for one in column] for column in columns)
        return States(torch.cat(before), _one(states), _one(log_probs), _one(mask))

    def forward(self, asked: Sequence[Asked]) -> States:
        """The states of a few answers, with a graph where the adapter trains."""
        chat = self.pipeline.conditioner
        rows = [as_weights(one.features, self.pipeline.policy, self.device) for one in asked]
        given, mask = stacked([one.tokens for one in asked], chat.pad_token, self.device)
        made = joined(rows, chat.pad_token, given, mask, own_positions=chat.own_positions)
        made = self.pipeline.shared.expected([one.key for one in asked], rows, made)
        out = self.model.base_model(**made, use_cache=False, output_hidden_states=True)
        count, last = given.shape[1], out.last_hidden_state
        layers = out.hidden_states
        chosen = [layers[0], layers[len(layers) // 2], last]
        states = torch.cat([layer[:, -count - 1 :].float() for layer in chosen], -1)
        ends = zip(last[:, -count - 1 : -1], given, strict=True)  # by row: logits of a whole batch take much memory
        log_probs = torch.cat([token_log_probs(self.head(row[None]), own[None], 1.0) for row, own in ends])
        return States(states[:, 0], states[:, 1:] * mask.unsqueeze(-1), log_probs.float() * mask, mask)

    def _tokens(self, text: str, before: int) -> Tensor:
        """The answer's tokens with the one that ends it, as many as the context has room for."""
        chat = self.pipeline.conditioner
        control = {*chat.stop_tokens, *chat.forbidden}
        found = tokenizer_of(chat.saved)(text, add_special_tokens=False).input_ids
        kept = [token for token in found if token not in control]
        if self.pipeline.context is not None:
            kept = kept[: max(0, self.pipeline.context - before - len(self.end))]
        return torch.tensor([*kept, *self.end])


def _one(parts: Sequence[Tensor]) -> Tensor:
    """``[B, T, ...]`` of parts whose ``T`` differs; padded with zeros."""
    return pad_sequence([row for part in parts for row in part], batch_first=True)


def _prompt(number: int, question: Question) -> Prompt:
    media = tuple(Media("image", data=png_bytes(picture)) for picture in question.pictures)
    return Prompt(str(number), question.text, media=media)
