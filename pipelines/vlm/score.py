"""Vision-language models that score a response to a prompt with pictures and clips: reward models, trained on pairs.

transformers has no such class for these families; ``mmrl.text.scoring`` puts it together from transformers' own parts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from mmrl._torchvision import allow_cpu_only
from mmrl.config.schema import Recipe
from mmrl.errors import UserError
from mmrl.text.pipeline import TextPipeline
from mmrl.text.scoring import Scorer, load_scorer, open_policy, refuse_others

from .chat import Chat, _load_processor, placeholders


def build(recipe: Recipe, path: str, device: torch.device) -> TextPipeline:
    """Load the model and processor at ``path``. Raises ``UserError`` where they cannot see, or are to write text."""
    refuse_others(recipe, "vlm/chat")
    chat = _chat(path, recipe.decoding.chat_template)
    return TextPipeline(chat, open_policy(recipe, path, chat.pad_token, device), recipe, device)


def scorer(path: str, variables: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Scorer:
    """The trained reward model at ``path``; ``variables`` of the chat template. Raises ``UserError``."""
    chat = _chat(path, variables)
    return Scorer(load_scorer(path, chat.pad_token, dtype, 0, trained=True), chat)


def _chat(path: str, variables: Mapping[str, Any]) -> Chat:
    allow_cpu_only()
    if importlib.util.find_spec("torchvision") is None:
        raise UserError("vision-language models need torchvision for their processors: pip install 'mmrl[vlm]'")
    from transformers import AutoConfig, AutoProcessor

    processor = _load_processor(AutoProcessor, path)
    end = processor.tokenizer.eos_token_id
    if end is None:
        raise UserError(f"model.path: the tokenizer of {path} has no eos_token; set it in tokenizer_config.json")
    return Chat(processor, [end], placeholders(AutoConfig.from_pretrained(path)), dict(variables))
