"""Vision-language models that score a response to a prompt with pictures and clips: reward models, trained on pairs.

transformers has no such class for these families; ``mmrl.text.scoring`` puts it together from transformers' own parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mmrl.config.schema import Recipe
from mmrl.errors import UserError
from mmrl.placement.description import Description
from mmrl.text.describing import describe as describe_text
from mmrl.text.describing import empty_scorer
from mmrl.text.pipeline import TextPipeline
from mmrl.text.recorded import files_of
from mmrl.text.scoring import Scorer, load_scorer, open_policy, refuse_others

from .chat import Chat, load_processor, placeholders


def build(recipe: Recipe, path: str, device: torch.device) -> TextPipeline:
    """Load the model and processor at ``path``. Raises ``UserError`` where they cannot see, or are to write text."""
    refuse_others(recipe, "vlm/chat")
    chat = _chat(path, recipe.decoding.chat_template)
    return TextPipeline(chat, open_policy(recipe, path, chat.pad_token, device), recipe, device)


def describe(recipe: Recipe, path: str, architecture: Path | None) -> Description:
    """The pipeline that ``build`` would make, on the meta device. Raises ``UserError`` as ``build`` does."""
    refuse_others(recipe, "vlm/chat")
    with files_of(path, architecture) as files:
        chat = _chat(files.path, recipe.decoding.chat_template)
        policy = empty_scorer(files.path, chat.pad_token, recipe)
    return describe_text(TextPipeline(chat, policy, recipe, torch.device("cpu")), files)


def scorer(path: str, variables: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Scorer:
    """The trained reward model at ``path``; ``variables`` of the chat template. Raises ``UserError``."""
    chat = _chat(path, variables)
    return Scorer(load_scorer(path, chat.pad_token, dtype, 0, trained=True), chat)


def _chat(path: str, variables: Mapping[str, Any]) -> Chat:
    from transformers import AutoConfig

    processor = load_processor(path)
    end = processor.tokenizer.eos_token_id
    if end is None:
        raise UserError(f"model.path: the tokenizer of {path} has no eos_token; set it in tokenizer_config.json")
    return Chat(processor, [end], placeholders(AutoConfig.from_pretrained(path)), dict(variables))
