"""Language models with a chat template (``AutoModelForCausalLM``)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from mmrl.config.schema import Model, Recipe
from mmrl.core.errors import UserError
from mmrl.core.library_loading import check_tokens, refused, try_tokenizer
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.episodes.showing import tools_shown
from mmrl.families.text.assembly import Load, build_writer, describe_writer
from mmrl.families.text.pipeline import LanguagePipeline
from mmrl.models.description import Description
from mmrl.models.text.chat import Chat
from mmrl.models.text.conditioner import Tokenizer
from mmrl.models.text.loading import stop_tokens

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedModel

OTHERWISE = "Set pipeline: vlm/chat for a model that sees pictures."
TESTED = ("qwen3", "qwen2", "llama", "qwen3_moe")


def build(recipe: Recipe, path: str, device: torch.device) -> LanguagePipeline:
    """Load the model and tokenizer at ``path``. Raises ``UserError`` where they cannot chat."""
    return build_writer(_parts, recipe, path, device, sees=False)


def describe(recipe: Recipe, path: str, architecture: Path | None) -> Description:
    """The pipeline that ``build`` would make, on the meta device. Raises ``UserError`` as ``build`` does."""
    return describe_writer(_parts, recipe, path, architecture)


def _parts(recipe: Recipe, path: str, load: Load) -> tuple[Chat[Tokenizer], PreTrainedModel]:
    """The conditioner, and the model as ``load`` makes it."""
    allow_cpu_only()  # transformers imports torchvision wherever it is installed
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = load_tokenizer(AutoTokenizer, path, recipe.model)
    model = load(AutoModelForCausalLM, recipe, path, TESTED, OTHERWISE)
    return Chat(tokenizer, stop_tokens(model, tokenizer), *tools_shown(tokenizer, recipe)), model


class AutoTokenizerClass(Protocol):
    """transformers' ``AutoTokenizer``."""

    @classmethod
    def from_pretrained(cls, path: str, /) -> ChatTokenizer: ...


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that may have a chat template."""

    chat_template: str | dict[str, str] | None


def load_tokenizer(auto: type[AutoTokenizerClass], path: str, settings: Model | None = None) -> Tokenizer:
    """The tokenizer at ``path``, with the chat template of ``settings``. Raises ``UserError`` if there is no tokenizer
    or no usable chat template, and if ``settings`` limit pictures."""
    from transformers import AutoConfig

    for key in ("min_pixels", "max_pixels"):
        if settings is not None and getattr(settings, key) is not None:
            raise UserError(f"model.{key}: this pipeline reads no pictures; remove it, or set a pipeline of vlm/")
    with refused(lambda reason: f"model.path: {path} has no tokenizer that can be used: {reason}"):
        tokenizer = auto.from_pretrained(path)
        try_tokenizer(tokenizer)
        with suppress(OSError):  # there is no config.json, which the model's own loading says
            check_tokens(tokenizer, AutoConfig.from_pretrained(path))
    if settings is not None and settings.chat_template is not None:
        tokenizer.chat_template = settings.chat_template
    if not tokenizer.chat_template:
        raise UserError(
            f"model.path: the tokenizer of {path} has no chat template, so the format of its prompts is unknown. "
            "Take an instruct model, set model.chat_template, or add chat_template.jinja to the directory"
        )
    return tokenizer
