"""Language models with a chat template (``AutoModelForCausalLM``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from PIL.Image import Image
from torch import Tensor

from mmrl._torchvision import allow_cpu_only
from mmrl.config.schema import Model, Recipe
from mmrl.episodes.showing import tools_shown
from mmrl.errors import UserError
from mmrl.json_types import JsonObject
from mmrl.media import Clip
from mmrl.pipelines.description import Description
from mmrl.text.assembly import Load, build_writer, describe_writer
from mmrl.text.conditioner import Tokenizer
from mmrl.text.conversation import messages_of, rendered
from mmrl.text.loading import stop_tokens
from mmrl.text.pipeline import LanguagePipeline
from mmrl.text.spelled import Spelled
from mmrl.text.told import behind_an_answer
from mmrl.trajectory import Prompt

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedModel

OTHERWISE = "Set pipeline: vlm/chat for a model that sees pictures."
TESTED = ("qwen3", "qwen2", "llama", "qwen3_moe")


class Chat:
    """Final class; see ``mmrl.text.conditioner.Conditioner``. A conversation that ends with the user's message."""

    own_positions = False

    def __init__(self, tokenizer: Tokenizer, stop: list[int], variables: JsonObject, tools: str = "") -> None:
        """``tools``: what the system message says of tools, where the chat template has no place for them."""
        self.saved, self.stop_tokens, self.variables, self._tools = tokenizer, stop, variables, tools
        self.forbidden: list[int] = []
        self.pad_token: int = stop[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._spelled = Spelled[Tokenizer](tokenizer, self._rendered)

    def encode(self, prompt: Prompt) -> dict[str, Tensor]:
        if prompt.media:
            raise UserError(
                f"the prompt {prompt.id} has {len(prompt.media)} pictures or clips, and pipeline llm/chat reads only "
                "text; set pipeline: vlm/chat and a vision-language model"
            )
        text, reader = self._spelled.read(prompt)
        return self._spelled.joined({"input_ids": torch.tensor(reader(text, add_special_tokens=False).input_ids)})

    def render(self, prompt: Prompt, *, answer: JsonObject | None = None, asks: bool = True) -> str:
        """The prompt in the model's chat format, up to the start of the answer. Raises ``BadPromptError``."""
        return self._spelled.text(prompt, partial(self._rendered, answer=answer, asks=asks))

    def unexpanded(self, prompt: Prompt) -> list[int]:
        return self.encode(prompt)["input_ids"].tolist()

    def spelled(self, prompt: Prompt) -> dict[str, int]:
        return self._spelled.found(prompt)

    def _rendered(self, prompt: Prompt, answer: JsonObject | None = None, *, asks: bool = True) -> str:
        return rendered(prompt, messages_of(prompt, self._tools), self.saved, self.variables, answer=answer, asks=asks)

    def told(self, role: Literal["user", "tool"], contents: Sequence[str]) -> list[int]:
        messages = [{"role": role, "content": self._spelled.plain(text)} for text in contents]
        return self._spelled.ids(behind_an_answer(self.saved, self.variables, messages))

    def media(self, prompt: Prompt) -> tuple[list[Image], list[Clip]]:
        return [], []

    def decode(self, tokens: Sequence[int]) -> str:
        return self.saved.decode(tokens, skip_special_tokens=True)

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in self.saved(list(texts), add_special_tokens=False).input_ids]


def build(recipe: Recipe, path: str, device: torch.device) -> LanguagePipeline:
    """Load the model and tokenizer at ``path``. Raises ``UserError`` where they cannot chat."""
    return build_writer(_parts, recipe, path, device, sees=False)


def describe(recipe: Recipe, path: str, architecture: Path | None) -> Description:
    """The pipeline that ``build`` would make, on the meta device. Raises ``UserError`` as ``build`` does."""
    return describe_writer(_parts, recipe, path, architecture)


def _parts(recipe: Recipe, path: str, load: Load) -> tuple[Chat, PreTrainedModel]:
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
    for key in ("min_pixels", "max_pixels"):
        if settings is not None and getattr(settings, key) is not None:
            raise UserError(f"model.{key}: this pipeline reads no pictures; remove it, or set a pipeline of vlm/")
    try:
        tokenizer = auto.from_pretrained(path)
    except Exception as error:  # its parser in Rust has no narrower class
        raise UserError(
            f"model.path: {path} has no tokenizer that can be loaded: {(str(error).splitlines() or [''])[0]}"
        ) from error
    if settings is not None and settings.chat_template is not None:
        tokenizer.chat_template = settings.chat_template
    if not tokenizer.chat_template:
        raise UserError(
            f"model.path: the tokenizer of {path} has no chat template, so the format of its prompts is unknown. "
            "Take an instruct model, set model.chat_template, or add chat_template.jinja to the directory"
        )
    return tokenizer
