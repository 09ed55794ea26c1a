"""How close is a response in meaning to what its prompt asks about? Cosine of two sentence embeddings (MiniLM).

The encoder is all-MiniLM-L6-v2 (Reimers and Gurevych 2019, arXiv 1908.10084): mean of the last hidden states over the
tokens, normalised. ``mmrl fetch all-minilm-l6-v2`` sets it up; any encoder of that kind may take its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.hub_files import check_files
from mmrl.core.library_loading import check_tokens, frozen, refused, try_tokenizer
from mmrl.core.packages.places import found, lacking
from mmrl.core.reward_contract import Context, Failed, Value, Weights
from mmrl.core.trajectory import Sample
from mmrl.rewards.sleeping import Sleeping

DEFAULT = "package:all-minilm-l6-v2"


def _models(options: Mapping[str, Any]) -> list[Weights]:
    return [Weights(found(str(options.get("path", DEFAULT))), "float32")]


@mmrl.reward(inputs=("text",), device=True, paths=("path",), models=_models, checks=True)
class Relevance(Sleeping):
    """``score``: the cosine, at least 0, over ``enough`` and at most 1. ``cosine``: itself.

    ``key``: the key of a prompt's meta with the text to compare with; None compares with the whole prompt. ``enough``:
    the cosine that is as good as any higher one, so that a run does not repeat the text to come nearer.
    """

    def __init__(self, path: str = DEFAULT, key: str | None = None, enough: float = 1.0, max_tokens: int = 256) -> None:
        if not 0 < enough <= 1:
            raise UserError(f"options.enough is {enough}; give a cosine from above 0 up to 1")
        if max_tokens < 1:
            raise UserError(f"options.max_tokens is {max_tokens}; set it to 1 or more")
        self.key, self.enough, self.max_tokens = key, enough, max_tokens
        self.model, self.tokenizer = self.kept(partial(_load, path))

    def score(self, samples: Sequence[Sample], *, context: Context) -> dict[str, Sequence[Value]]:
        """A prompt without the text to compare with fails; an empty response has the cosine 0."""
        wanted = [s.prompt.text if self.key is None else s.prompt.meta.get(self.key) for s in samples]
        rows = [i for i, text in enumerate(wanted) if isinstance(text, str) and text.strip()]
        cosines: list[Value] = [Failed(f"the prompt's meta has no text under {self.key!r}; correct options.key")] * len(
            samples
        )
        if rows:
            said = [(samples[i].text or "").strip() for i in rows]
            both = self.embed([*said, *(str(wanted[i]) for i in rows)], context.device)
            for place, text, value in zip(rows, said, (both[: len(rows)] * both[len(rows) :]).sum(1), strict=True):
                cosines[place] = float(value) if text else 0.0
        scores: list[Value] = [
            min(max(value, 0.0) / self.enough, 1.0) if isinstance(value, float) else value for value in cosines
        ]
        return {"score": scores, "cosine": cosines}

    @torch.no_grad()
    def embed(self, texts: Sequence[str], device: torch.device | str = "cpu") -> torch.Tensor:
        """``[B, D]`` float32 on the CPU, of length 1."""
        self.wake(device)
        inputs = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(device)
        hidden = self.model(**inputs).last_hidden_state.float()
        mask = inputs["attention_mask"].unsqueeze(-1).float()
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(mean, dim=1).cpu()


score = Relevance


def _load(path: str) -> tuple[Any, Any]:
    """The encoder (frozen, on the CPU) and its tokenizer. Raises ``UserError``."""
    from transformers import AutoModel, AutoTokenizer

    if unset := lacking(path):
        raise UserError(f"the reward's options.path: {unset}")
    path = found(path)
    check_files(path)
    mmrl.before_loading()
    with refused(
        lambda reason: (
            f"cannot load a sentence encoder from {path}: {reason}; set the reward's options.path "
            f"to a directory of transformers, or to {DEFAULT}"
        )
    ):
        tokenizer = AutoTokenizer.from_pretrained(path)
        try_tokenizer(tokenizer)
        model = frozen(AutoModel, path, ("pooler.",), dtype=torch.float32)
        check_tokens(tokenizer, model.config)
    return model, tokenizer
