"""Vision-language models that score a response to a prompt with pictures and clips: reward models, trained on pairs.

transformers has no such class for these families; ``mmrl.families.text.scoring`` makes it from transformers' own parts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from mmrl.config.data import Data
from mmrl.config.schema import Model, Recipe
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.library_loading import refused
from mmrl.families.text.assembly import build_scorer, describe_scorer
from mmrl.families.text.pipeline import LanguagePipeline
from mmrl.families.text.scoring import Scorer, load_scorer, refuse_others
from mmrl.models.description import Description

from .chat import Chat, load_processor, placeholders


def build(recipe: Recipe, path: str, device: torch.device) -> LanguagePipeline:
    """Load the model and processor at ``path``. Raises ``UserError`` if they cannot see, or if the recipe
    trains no scores."""
    refuse_others(recipe, "vlm/chat")
    return build_scorer(partial(_chat, data=recipe.data), recipe, path, device)


def describe(recipe: Recipe, path: str, architecture: Path | None) -> Description:
    """The pipeline that ``build`` would make, on the meta device. Raises ``UserError`` as ``build`` does."""
    refuse_others(recipe, "vlm/chat")
    return describe_scorer(partial(_chat, data=recipe.data), recipe, path, architecture)


def scorer(path: str, variables: JsonObject, dtype: torch.dtype = torch.float32) -> Scorer:
    """The trained reward model at ``path``; ``variables`` of the chat template. Raises ``UserError``."""
    chat = _chat(path, variables)
    return Scorer(load_scorer(path, chat.pad_token, dtype, 0, trained=True), chat)


def _chat(path: str, variables: JsonObject, settings: Model | None = None, data: Data | None = None) -> Chat:
    from transformers import AutoConfig

    processor = load_processor(path, settings, data)
    end = processor.tokenizer.eos_token_id
    if end is None:
        raise UserError(f"model.path: the tokenizer of {path} has no eos_token; set it in tokenizer_config.json")
    with refused(lambda reason: f"model.path: config.json of {path} cannot be read: {reason}"):
        config = AutoConfig.from_pretrained(path)
    return Chat(processor, [end], dict(variables), forbidden=placeholders(config))
