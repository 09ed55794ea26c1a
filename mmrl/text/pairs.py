"""Pairs of a better and a worse response: tokens, log-probs and scores, with both texts in one forward.

A prompt carries its pair in ``meta``, by the columns of TRL's preference data: ``chosen`` and ``rejected``, and perhaps
``margin`` (how much better, for reward models).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.errors import BadPromptError, UserError
from mmrl.text.given import GivenTexts, WritingModel, given_message, given_text
from mmrl.trajectory import Prompt, Rows

COLUMNS = ("chosen", "rejected")


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
