"""Language models that score a response: reward models, trained on pairs (``AutoModelForSequenceClassification``)."""

from __future__ import annotations

from functools import partial

import torch

from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.families.text.assembly import build_scorer, describe_scorer
from mmrl.families.text.scoring import Scorer, load_scorer
from mmrl.models.text.chat import Chat
from mmrl.models.text.conditioner import Tokenizer

from .chat import load_tokenizer


def scorer(path: str, variables: JsonObject, dtype: torch.dtype = torch.float32) -> Scorer:
    """The trained reward model at ``path``; ``variables`` of the chat template. Raises ``UserError``."""
    chat = _chat(path, variables)
    return Scorer(load_scorer(path, chat.pad_token, dtype, 0, trained=True), chat)


def _chat(path: str, variables: JsonObject, recipe: Recipe | None = None) -> Chat[Tokenizer]:
    tokenizer = load_tokenizer(path, recipe and recipe.model)
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.path: the tokenizer of {path} has no eos_token; set it in tokenizer_config.json")
    return Chat(tokenizer, [tokenizer.eos_token_id], dict(variables))


build = partial(build_scorer, _chat, "llm/chat")
describe = partial(describe_scorer, _chat, "llm/chat")
