"""Vision-language models that score a response to a prompt with pictures and clips: reward models, trained on pairs.

transformers has no such class for these families; ``mmrl.families.text.scoring`` makes it from transformers' own parts.
"""

from __future__ import annotations

from functools import partial

import torch

from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.library_loading import refused
from mmrl.families.text.assembly import build_scorer, describe_scorer
from mmrl.families.text.scoring import Scorer, load_scorer

from .chat import Chat, load_processor, placeholders


def scorer(path: str, variables: JsonObject, dtype: torch.dtype = torch.float32) -> Scorer:
    """The trained reward model at ``path``; ``variables`` of the chat template. Raises ``UserError``."""
    chat = _chat(path, variables)
    return Scorer(load_scorer(path, chat.pad_token, dtype, 0, trained=True), chat)


def _chat(path: str, variables: JsonObject, recipe: Recipe | None = None) -> Chat:
    from transformers import AutoConfig

    processor = load_processor(path, recipe)
    end = processor.tokenizer.eos_token_id
    if end is None:
        raise UserError(f"model.path: the tokenizer of {path} has no eos_token; set it in tokenizer_config.json")
    with refused(lambda reason: f"model.path: config.json of {path} cannot be read: {reason}"):
        config = AutoConfig.from_pretrained(path)
    return Chat(processor, [end], dict(variables), forbidden=placeholders(config))


build = partial(build_scorer, _chat, "vlm/chat")
describe = partial(describe_scorer, _chat, "vlm/chat")
