"""A scalar reward model as a reward: an export of a run with ``algorithm.type: reward_model``.

    - name: reward_model
      options: {path: my-reward-model}       # from the recipe's folder

It scores each response behind its prompt, with the prompt's pictures and clips where the model sees. A language model
of the same format from elsewhere (``AutoModelForSequenceClassification`` with one label) will do too, where it has a
chat template. Scores have no scale of their own: ``normalize: batch`` or ``group`` gives them one. A sample that cannot
be read (too long, broken pictures, control tokens in its text) fails and gets no number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.hub_files import check_files
from mmrl.core.reward_contract import Context, Failed, weights_in_half
from mmrl.core.trajectory import Sample
from mmrl.families.text.scoring import settings_at
from mmrl.rewards.sleeping import DTYPES, Sleeping, check_dtype, dtype_on


@mmrl.reward(inputs=("text",), device=True, paths=("path",), models=weights_in_half, checks=True)
class RewardModel(Sleeping):
    """The reward model's number for each response.

    ``batch_size``: responses in a forward. ``dtype``: of its weights, but for the head, which is float32; ``auto`` is
    bfloat16 where the device has it. ``chat_template``: variables of the template, and ``pipeline``: which of
    ``llm/score`` and ``vlm/score`` reads it; both are known of what was exported here.
    """

    def __init__(
        self,
        path: str,
        batch_size: int = 16,
        dtype: str = "auto",
        chat_template: Mapping[str, Any] | None = None,
        pipeline: str | None = None,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"options.batch_size is {batch_size}; set it to 1 or more")
        dtype = dtype_on(check_dtype(dtype, (*DTYPES, "float16")), "auto")
        check_files(path)
        noted = settings_at(path)
        variables = noted.get("chat_template", {}) if chat_template is None else chat_template
        name = pipeline or str(noted.get("pipeline") or _guess(path))
        if name not in ("llm/score", "vlm/score"):
            raise UserError(f"options.pipeline is {name!r}; set it to llm/score, or vlm/score for a model that sees")
        self.batch_size = batch_size
        mmrl.before_loading()
        load = partial(mmrl.load("pipelines", name).scorer, path, variables, getattr(torch, dtype))
        self._scorer = load()
        self.frozen(self._scorer.model, lambda: load().model)

    def score(self, samples: Sequence[Sample], *, context: Context) -> list[float | Failed]:
        """One number per sample."""
        self.wake(context.device)
        return self._scorer.score([s.prompt for s in samples], [s.text or "" for s in samples], self.batch_size)


score = RewardModel


def _guess(path: str) -> str:
    """What reads a directory that says nothing: one with an image processor holds a model that sees."""
    sees = any((Path(path) / name).is_file() for name in ("processor_config.json", "preprocessor_config.json"))
    return "vlm/score" if sees else "llm/score"
