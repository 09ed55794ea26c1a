"""Language models that score a response: reward models, trained on pairs (``AutoModelForSequenceClassification``)."""

from __future__ import annotations

from pathlib import Path

import torch

from mmrl.config.schema import Model, Recipe
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.families.text.assembly import build_scorer, describe_scorer
from mmrl.families.text.pipeline import LanguagePipeline
from mmrl.families.text.scoring import Scorer, load_scorer, refuse_others
from mmrl.models.description import Description
from mmrl.models.text.chat import Chat
from mmrl.models.text.conditioner import Tokenizer

from .chat import load_tokenizer


def build(recipe: Recipe, path: str, device: torch.device) -> LanguagePipeline:
    """Load the model and tokenizer at ``path``. Raises ``UserError`` if they cannot chat, or if the recipe
    trains no scores."""
    refuse_others(recipe, "llm/chat")
    return build_scorer(_chat, recipe, path, device)


def describe(recipe: Recipe, path: str, architecture: Path | None) -> Description:
    """The pipeline that ``build`` would make, on the meta device. Raises ``UserError`` as ``build`` does."""
    refuse_others(recipe, "llm/chat")
    return describe_scorer(_chat, recipe, path, architecture)


def scorer(path: str, variables: JsonObject, dtype: torch.dtype = torch.float32) -> Scorer:
    """The trained reward model at ``path``; ``variables`` of the chat template. Raises ``UserError``."""
    chat = _chat(path, variables)
    return Scorer(load_scorer(path, chat.pad_token, dtype, 0, trained=True), chat)


def _chat(path: str, variables: JsonObject, settings: Model | None = None) -> Chat[Tokenizer]:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(AutoTokenizer, path, settings)
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.path: the tokenizer of {path} has no eos_token; set it in tokenizer_config.json")
    return Chat(tokenizer, [tokenizer.eos_token_id], dict(variables))
