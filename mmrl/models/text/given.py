"""Texts that the data gives as responses to a prompt: their tokens, log-probs and scores, all of a row in one forward.

A prompt carries its texts in ``meta``, by the columns of TRL's data (``Pairs``, ``Responses``). The
tokens of prompt and response are those of the chat template's own rendering of the whole conversation
(``mmrl.models.text.answered``).

A response is in ``meta`` by the columns of TRL's prompt-completion data: ``completion``, a text or a
list of messages that ends with the assistant's, and of its unpaired preference data ``label`` as well.

A pair of a better and a worse response, whose texts go through one forward, is in ``meta`` by the columns of TRL's
preference data: ``chosen`` and ``rejected``, and perhaps ``margin`` (how much better, for reward models).
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from mmrl.config.algorithm_settings import ResponseSettings
from mmrl.config.schema import Recipe
from mmrl.controller.features import FeatureStore
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.trajectory import REASONING, Prompt, Rows, Slot, TextRows, Turn
from mmrl.core.transfer import to_device
from mmrl.models.text.answered import answer_tokens, content_of
from mmrl.models.text.chat import Conditioner
from mmrl.models.text.features import key_of

_CUT = "/cut"
"""Behind the name of a text: how many of the prompt's last tokens it replaces."""
OTHER = "response of another prompt"
"""In ``meta``, beside a prompt's own response."""
COLUMNS = ("chosen", "rejected")


class WritingModel(Protocol):
    """What the given texts of a run ask of its pipeline."""

    recipe: Recipe
    policy: nn.Module
    conditioner: Conditioner
    features: FeatureStore
    device: torch.device
    context: int | None
    """The most tokens of a prompt and its response; None where the model says none."""


class GivenTexts(ABC):
    """Abstract. The given texts of a run of ``pipeline``; every prompt has the same ``names``."""

    scores = False
    """Whether the model scores a text, in place of writing it."""
    every_token = False
    """Whether log-probs are among all tokens, those that stand for pictures too, which sampling never draws."""

    def __init__(self, pipeline: WritingModel) -> None:
        self.pipeline = pipeline
        self.columns: Mapping[str, str] = pipeline.recipe.algorithm.given_texts

    @abstractmethod
    def texts(self, prompt: Prompt) -> Mapping[str, str]:
        """The texts of ``prompt`` by name. Raises ``BadPromptError`` where they are not there or cannot be trained
        on."""

    @abstractmethod
    def recorded(self, rows: Rows) -> dict[str, Tensor]:
        """What the data says of each row beside its texts, ``[B]``."""

    @abstractmethod
    def sizes(self, rows: Rows) -> list[int]:
        """What each row counts in the update's denominator, where the objective counts by length."""

    def key(self, prompt: Prompt) -> str:
        """Names the tokens of a prompt's texts in the feature store: equal for equal texts behind an equal prompt."""
        said = repr(tuple(prompt.meta.get(column) for column in self.columns.values()))
        return f"{key_of(prompt)}/given/{hashlib.blake2b(said.encode(), digest_size=12).hexdigest()}"

    def encoded(self, prompt: Prompt, length: int) -> dict[str, Tensor]:
        """The tokens of its texts by name, on the CPU; ``length``: tokens of the prompt.

        Raises ``BadPromptError`` where a text is missing, or cannot be trained on.
        """
        out: dict[str, Tensor] = {}
        self.texts(prompt)  # all that is wrong with them is said here
        for name, column in self.columns.items():
            tokens, cut = self.behind(prompt, column)
            out[name] = torch.tensor(tokens)
            if cut:
                out[name + _CUT] = torch.zeros(cut)  # its length is known without its data
            most, n = self.pipeline.context, length - cut + len(tokens)
            if most is not None and n > most:
                raise BadPromptError(
                    prompt.id,
                    f"with meta[{column!r}] it has {n} tokens, and the model's context {most}; shorten it or take it "
                    "out",
                )
        return out

    def behind(self, prompt: Prompt, column: str) -> tuple[list[int], int]:
        """The tokens of the response in ``meta[column]``, and how many of the prompt's last ones they replace. Raises
        ``BadPromptError``."""
        message = given_message(prompt, column)
        try:
            return answer_tokens(self.pipeline.conditioner, prompt, message, ends=not self.scores)
        except ValueError as error:
            raise BadPromptError(prompt.id, f"meta[{column!r}] {error}; mend it or take the record out") from None

    def lengths(self, rows: Rows) -> list[int]:
        """Tokens of each row: prompt and longest text, once for each text, as they lie in a forward."""
        features, times = self.pipeline.features, len(self.columns)
        prompts = [features.ref(key_of(s.prompt)).shapes["input_ids"][0] for s in rows.slots]
        texts = [features.ref(self.key(s.prompt)).shapes for s in rows.slots]
        return [times * (n + max(of[name][0] for name in self.columns)) for n, of in zip(prompts, texts, strict=True)]

    def given(self, rows: Rows) -> TextRows:
        """A row for each text of ``rows``: all of the first name, then those of the next."""
        found = [self.pipeline.features.get(self.key(slot.prompt)) for slot in rows.slots]
        cuts = [len(of.get(name + _CUT, ())) for name in self.columns for of in found]
        every = rows.join([rows] * len(self.columns))
        return self.behind_prompts(every, [of[name] for name in self.columns for of in found], cuts)

    def behind_prompts(self, rows: Rows, texts: Sequence[Tensor], cuts: Sequence[int]) -> TextRows:
        """Rows of ``texts`` ``[T_i]``, each behind the prompt of its row without its last ``cuts`` tokens."""
        device, prompts = self.pipeline.device, list[tuple[str, Tensor]]()
        for slot, cut in zip(rows.slots, cuts, strict=True):
            tokens = self.pipeline.features.get(key_of(slot.prompt))["input_ids"]
            prompts.append((key_of(slot.prompt), tokens[: len(tokens) - cut]))
        whole = torch.zeros(len(rows), dtype=torch.bool, device=device)
        return TextRows.answers(rows.slots, rows.ids, prompts, [to_device(text, device) for text in texts], whole)

    def by_name(self, what: str, values: Tensor) -> dict[str, Tensor]:
        """``values`` of ``rows``, as ``<name>_<what>`` ``[B]`` each."""
        return {
            f"{name}_{what}": part for name, part in zip(self.columns, values.chunk(len(self.columns)), strict=True)
        }


def given_text(prompt: Prompt, column: str, columns: Sequence[str]) -> str:
    """The response in ``prompt.meta[column]``, a text or messages. Raises ``BadPromptError`` where there is none;
    ``columns``: all that a record must have."""
    if column not in prompt.meta:
        raise BadPromptError(
            prompt.id,
            f"it has no meta[{column!r}], which is trained on; a record of a file has the columns "
            f"{' and '.join(columns)}, or others that data.train.columns names",
        )
    return content_of(given_message(prompt, column))


def given_message(prompt: Prompt, column: str) -> JsonObject:
    """The response in ``prompt.meta[column]`` as a message of the assistant with its content as text, and with its
    reasoning where it has some. Raises ``BadPromptError``."""
    try:
        return _message_of(prompt.meta.get(column), prompt)
    except ValueError as error:
        raise BadPromptError(prompt.id, f"meta[{column!r}] {error}; give the response's text") from None


def stacked(texts: Sequence[Tensor], pad_token: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Tokens and mask ``[B, T]`` of texts ``[T_i]``, padded on the right."""
    tokens = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=pad_token)
    lengths = torch.tensor([len(text) for text in texts])
    mask = (torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)).float()
    return tokens.to(device), mask.to(device)


def _message_of(response: Json, prompt: Prompt) -> JsonObject:
    """A response that is a text, or messages with the response as the last. Raises ``ValueError``."""
    if isinstance(response, str):
        return {"role": "assistant", "content": response}
    messages = [m for m in response if isinstance(m, Mapping)] if isinstance(response, Sequence) else []
    if not isinstance(response, Sequence) or not messages or len(messages) < len(response):
        raise ValueError(f"is a {type(response).__name__}, neither text nor messages")
    last = messages[-1]
    if last.get("role") != "assistant":
        raise ValueError("does not end with a message of the assistant")
    before = [m for m in messages[:-1] if m.get("role") != "system"]
    asked = [*prompt.turns, Turn("user", prompt.text)]
    if before and len(before) != len(asked):
        raise ValueError(
            f"has {len(before)} messages before its answer, and the prompt {len(asked)}; a response is one message"
        )
    if any(_differs(message, turn) for message, turn in zip(before, asked, strict=False)):
        raise ValueError("answers another message of the user than the prompt's, or another conversation")
    reasoning = {key: said for key in REASONING if isinstance(said := last.get(key), str) and said}
    return {"role": "assistant", "content": _content(last), **reasoning}


def _differs(message: JsonObject, turn: Turn) -> bool:
    content = message.get("content")
    same = not isinstance(content, str) or content.replace("\r\n", "\n").strip() == turn.text
    return message.get("role") != turn.role or not same


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


class Responses(GivenTexts):
    """Final class. The responses of a run of ``pipeline``. Log-probs are among all tokens, as in
    transformers' own loss: a model that has not seen many answers must learn not to draw those that stand for
    pictures."""

    every_token = True

    def __init__(self, pipeline: WritingModel) -> None:
        super().__init__(pipeline)
        settings = pipeline.recipe.algorithm
        self.label = settings.label_column if isinstance(settings, ResponseSettings) else None

    def texts(self, prompt: Prompt) -> Mapping[str, str]:
        column = self.columns["completion"]
        if self.label is not None:
            label_of(prompt, self.label)
        columns = [column] if self.label is None else [column, self.label]
        return {"completion": given_text(prompt, column, columns)}

    def recorded(self, rows: Rows) -> dict[str, Tensor]:
        """``labels``, 1 for good responses, where the data has labels."""
        if self.label is None:
            return {}
        labels = [float(label_of(slot.prompt, self.label)) for slot in rows.slots]
        return {"labels": torch.tensor(labels, device=self.pipeline.device)}

    def sizes(self, rows: Rows) -> list[int]:
        """The tokens of each response, its end among them."""
        return [self.pipeline.features.ref(self.key(slot.prompt)).shapes["completion"][0] for slot in rows.slots]

    def beside(self, slot: Slot, other: Prompt) -> Slot:
        """``slot`` with the response of ``other``, for an objective that compares it with its own: ``compare``
        recomputes ``mismatched_log_ratio`` ``[B]``, that of policy and reference behind the prompt of ``slot``."""
        self.texts(other)
        meta = {**slot.prompt.meta, OTHER: [dict(given_message(other, self.columns["completion"]))]}
        return replace(slot, prompt=replace(slot.prompt, meta=meta))

    def mismatched(self, rows: Rows) -> TextRows:
        """Each prompt with the response of another, cut where the model's context ends."""
        texts, cuts, context = list[Tensor](), list[int](), self.pipeline.context
        for slot in rows.slots:
            tokens, cut = self.behind(slot.prompt, OTHER)
            length = self.pipeline.features.ref(key_of(slot.prompt)).shapes["input_ids"][0] - cut
            texts.append(torch.tensor(tokens if context is None else tokens[: max(1, context - length)]))
            cuts.append(cut)
        return self.behind_prompts(rows, texts, cuts)


def label_of(prompt: Prompt, column: str) -> bool:
    """Whether the prompt's response is good. Raises ``BadPromptError`` where the data does not say."""
    said = prompt.meta.get(column)
    if said is None or said not in (True, False):
        raise BadPromptError(
            prompt.id,
            f"meta[{column!r}] is {said!r}, neither true (good) nor false (bad); algorithm.labels names the column",
        )
    return bool(said)


@dataclass(frozen=True)
class Pair:
    """``margin``: the score of ``chosen`` should be higher by at least this; 0 without a margin."""

    chosen: str
    rejected: str
    margin: float = 0.0


class Pairs(GivenTexts):
    """Final class. The pairs of a run of ``pipeline``.

    Raises ``UserError`` if the algorithm does not train this kind of model.
    """

    def __init__(self, pipeline: WritingModel) -> None:
        self.scores = pipeline.recipe.algorithm.trains_scores
        if self.scores and not hasattr(pipeline.policy, "score"):
            raise UserError(
                f"pipeline: {pipeline.recipe.pipeline} writes text, and {pipeline.recipe.algorithm.label} trains a "
                "score; set pipeline: llm/score (vlm/score for prompts with pictures)"
            )
        super().__init__(pipeline)

    def texts(self, prompt: Prompt) -> Mapping[str, str]:
        pair = pair_of(prompt)
        return {"chosen": pair.chosen, "rejected": pair.rejected}

    def recorded(self, rows: Rows) -> dict[str, Tensor]:
        """``margins``, 0 where the data gives none."""
        values = [pair_of(slot.prompt).margin for slot in rows.slots]
        return {"margins": torch.tensor(values, device=self.pipeline.device)}

    def sizes(self, rows: Rows) -> list[int]:
        return [1] * len(rows)


def pair_of(prompt: Prompt) -> Pair:
    """The pair in ``prompt.meta``. Raises ``BadPromptError`` where there is none."""
    texts = [given_text(prompt, column, COLUMNS) for column in COLUMNS]
    if given_message(prompt, COLUMNS[0]) == given_message(prompt, COLUMNS[1]):
        raise BadPromptError(prompt.id, "its two responses are equal, so that neither is better; take it out")
    margin = prompt.meta.get("margin")
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float)):
        raise BadPromptError(prompt.id, f"meta['margin'] is {margin!r}; give a number, or none")
    if margin is not None and not math.isfinite(margin):
        raise BadPromptError(prompt.id, f"meta['margin'] is {margin}; give a finite number, or none")
    return Pair(texts[0], texts[1], float(margin or 0.0))
