"""Given responses, one a prompt: tokens and log-probs.

A prompt carries its response in ``meta``, by the columns of TRL's prompt-completion data: ``completion``, a text or a
list of messages that ends with the assistant's, and of its unpaired preference data ``label`` as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.algorithms.settings import ResponseSettings
from mmrl.errors import BadPromptError
from mmrl.text.features import key_of
from mmrl.text.given import GivenTexts, WritingModel, given_message, given_text
from mmrl.trajectory import Prompt, Rows, Slot, TextRows

OTHER = "response of another prompt"
"""In ``meta``, beside a prompt's own response."""


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
        """See ``mmrl.pipelines.protocol.ResponseUpdates``."""
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
