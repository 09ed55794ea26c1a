"""Language models with a chat template (``AutoModelForCausalLM``)."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from mmrl.config.schema import Model, Recipe
from mmrl.core.errors import UserError
from mmrl.core.library_loading import check_tokens, refused, try_tokenizer
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.episodes.showing import tools_shown
from mmrl.families.text.assembly import Load, build_writer, describe_writer
from mmrl.models.text.chat import Chat
from mmrl.models.text.conditioner import Tokenizer
from mmrl.models.text.loading import stop_tokens

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedModel

OTHERWISE = "Set pipeline: vlm/chat for a model that sees pictures."
TESTED = ("qwen3", "qwen2", "llama", "qwen3_moe")


def _parts(recipe: Recipe, path: str, load: Load) -> tuple[Chat[Tokenizer], PreTrainedModel]:
    """The conditioner, and the model as ``load`` makes it."""
    allow_cpu_only()  # transformers imports torchvision wherever it is installed
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(path, recipe.model)
    model = load(AutoModelForCausalLM, recipe, path, TESTED, OTHERWISE)
    return Chat(tokenizer, stop_tokens(model, tokenizer), *tools_shown(tokenizer, recipe)), model


build = partial(build_writer, _parts, sees=False)
describe = partial(describe_writer, _parts)


def load_tokenizer(path: str, settings: Model | None = None) -> Tokenizer:
    """The tokenizer at ``path``, with the chat template of ``settings``. Raises ``UserError`` if there is no tokenizer
    or no usable chat template, and if ``settings`` limit pictures."""
    from transformers import AutoConfig, AutoTokenizer

    for key in ("min_pixels", "max_pixels"):
        if settings is not None and getattr(settings, key) is not None:
            raise UserError(f"model.{key}: this pipeline reads no pictures; remove it, or set a pipeline of vlm/")
    with refused(lambda reason: f"model.path: {path} has no tokenizer that can be used: {reason}"):
        tokenizer = AutoTokenizer.from_pretrained(path)
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
