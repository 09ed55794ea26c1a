"""Embeddings of answers by the language model that wrote them, which reads each behind its prompt and its pictures.

One part are the model's states at the end of the prompt and at the end of the answer (``mmrl.readers.texts``); the
other are probabilities: what the model gives to the answer's first token, to all of them together, to a token in the
mean (geometric), to the least likely one, and to the end of the answer. They say how sure the model was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from mmrl.errors import BadPromptError, UserError
from mmrl.json_types import JsonObject
from mmrl.readers.texts import Question, States, TextReader


class AnswerReader:
    """Raises ``UserError`` where the model is not there any more."""

    def __init__(self, model: JsonObject) -> None:
        self.reader = TextReader(model, "embeds texts", "mmrl spread")

    def parts(
        self, texts: Sequence[str], prompts: Sequence[str], pictures: Sequence[tuple[Image.Image, ...]]
    ) -> list[Tensor]:
        """The states and the probabilities of answers to prompts with pictures, ``[B, D]`` each. Raises ``UserError``
        for a prompt that the model cannot read."""
        found: list[Question] = []
        places: list[int] = []
        for prompt, shown in zip(prompts, pictures, strict=True):
            question = Question(prompt, shown)
            if not found or found[-1] != question:  # the answers to a question mostly follow one another
                found.append(question)
            places.append(len(found) - 1)
        try:
            read = self.reader.states(self.reader.asked(found, places, texts))
        except BadPromptError as error:
            raise UserError(
                f"--model cannot read the prompt {found[int(error.prompt)].text[:60]!r}: {error.reason}; take its "
                "samples out of the folder, or leave --model out"
            ) from error
        last = read.mask.sum(1).long() - 1
        ends = read.answers[torch.arange(len(last)), last]
        return [torch.cat([read.before, ends], 1), _probabilities(read, last)]


def _probabilities(read: States, last: Tensor) -> Tensor:
    log_probs, mask = read.log_probs, read.mask
    total = log_probs.sum(1)
    least = log_probs.masked_fill(mask == 0, 0.0).amin(1)
    end = log_probs[torch.arange(len(last)), last]
    return torch.stack([log_probs[:, 0], total, total / mask.sum(1), least, end], 1).exp()
