"""The conversation of a chat model, which ends with the user's message: how prompts become its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Generic, TypeAlias

import torch
from PIL.Image import Image
from torch import Tensor

from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.media import BadMediaError, Clip, Media
from mmrl.core.trajectory import Prompt
from mmrl.models.text.conditioner import Messages, Processor, Tokenizer, tokenizer_of
from mmrl.models.text.conversation import MEND, messages_of, messages_with_media, rendered
from mmrl.models.text.spelled import Saved, Spelled
from mmrl.models.text.template_probe import TemplateFaultError
from mmrl.models.text.told import Contents, Role, Told, behind_an_answer, pictures_of
from mmrl.models.text.written_pictures import Frame


class Chat(Generic[Saved]):
    """How a family turns prompts into what its model is called with. This one reads text alone; a family that reads
    pictures has a subclass.

    ``saved``: the tokenizer or processor, which an export saves with the weights. ``stop``: tokens that end a response.
    ``variables``: of the chat template. ``tools``: what the system message says of tools, where the chat template has
    no place for them. ``forbidden``: tokens that stand for media; in a response they would ask the
    model for pictures that are not there. ``shown``: see ``Spelled``.
    """

    no_pictures: str = "the model reads only text; take a vision-language model and set pipeline: vlm/chat"
    """Why it cannot be shown pictures behind an answer; empty where it can."""
    frame: Frame | None = None
    """Of a model that writes pictures as tokens."""
    own_positions: bool = False
    """The model counts positions itself (multimodal RoPE); otherwise they are counted from the attention mask."""

    def __init__(
        self,
        saved: Saved,
        stop: list[int],
        variables: JsonObject,
        tools: str = "",
        *,
        forbidden: Sequence[int] = (),
        shown: bool = False,
    ) -> None:
        self.saved, self.stop_tokens, self.variables, self._tools = saved, stop, variables, tools
        self.forbidden: list[int] = list(forbidden)
        self.tokenizer = tokenizer_of(saved)
        self.pad_token: int = stop[0] if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        self._messages = messages_with_media if self.tokenizer is not saved else messages_of
        self.texts = Spelled(saved, self._rendered, shown=shown)

    def encode(self, prompt: Prompt) -> dict[str, Tensor]:
        """``input_ids`` ``[P]`` and what else the model takes, on the CPU. Raises ``UserError`` for a bad prompt."""
        if prompt.media:
            raise UserError(
                f"the prompt {prompt.id} has {len(prompt.media)} pictures or clips, and pipeline llm/chat reads only "
                "text; set pipeline: vlm/chat and a vision-language model"
            )
        return self._tokens(prompt, adds=False)

    def negative(self, prompt: Prompt) -> dict[str, Tensor]:
        """What guidance moves away from for ``prompt``, as ``encode`` makes it. Raises ``TypeError`` where there is no
        guidance."""
        raise TypeError("text has no guidance")

    def unexpanded(self, prompt: Prompt) -> list[int]:
        """Its tokens with one placeholder per medium."""
        return self._tokens(prompt, adds=False)["input_ids"].tolist()

    def _tokens(self, prompt: Prompt, *, adds: bool) -> dict[str, Tensor]:
        """``adds``: the special tokens that the tokenizer begins a text with."""
        text, reader = self.texts.read(prompt)
        ids = tokenizer_of(reader)(text, add_special_tokens=adds).input_ids
        return self.texts.joined({"input_ids": torch.tensor(ids)})

    def render(self, prompt: Prompt, *, answer: JsonObject | None = None, asks: bool = True) -> str:
        """The prompt in the model's chat format, one placeholder per medium, up to where its answer begins; with an
        ``answer``, the message of the assistant, the conversation that ends with it. Not ``asks``: without what the
        template writes before an answer. Control tokens that the prompt's own text spells have a space in them.
        Raises ``BadPromptError``."""
        return self.texts.text(prompt, partial(self._rendered, answer=answer, asks=asks))

    def _rendered(
        self, prompt: Prompt, answer: JsonObject | None = None, behind: Messages = (), *, asks: bool = True
    ) -> str:
        messages = self._messages(prompt, self._tools)
        return rendered(prompt, messages, self.saved, self.variables, answer=answer, behind=behind, asks=asks)

    def conversation(
        self, prompt: Prompt, role: Role, turns: Sequence[tuple[str, Contents]], *, asks: bool = True
    ) -> str:
        """The text of ``prompt`` and of ``turns`` behind it: what the assistant wrote in each, and what it was told
        then. ``texts.ids`` makes its tokens. Raises ``BadPromptError`` as ``render``."""
        said = [({"role": "assistant", "content": self._content([text])}, *self._told(role, of)) for text, of in turns]
        behind = [message for turn in said for message in turn]
        return self.texts.seamed(prompt, partial(self._rendered, behind=behind, asks=asks))

    def told(self, role: Role, contents: Contents) -> Told:
        """What is behind an answer: what ends it, a message for each of ``contents``, and what begins the next answer.
        Raises ``TemplateFaultError`` where the chat template does not show such messages, and ``BadMediaError``."""
        if self.no_pictures and pictures_of(contents):
            raise BadMediaError(f"a picture was shown, and {self.no_pictures}")
        ids = self.texts.ids(self.behind(role, contents))
        return Told(ids, ids)

    def behind(self, role: Role, contents: Contents, *, asks: bool = True) -> str:
        """The text of ``told``, a placeholder for each picture. Not ``asks``: without what begins the next answer."""
        return behind_an_answer(self.saved, self.variables, self._told(role, contents), asks=asks)

    def _told(self, role: Role, contents: Contents) -> list[JsonObject]:
        return [{"role": role, "content": self._content([c] if isinstance(c, str) else c, told=True)} for c in contents]

    def _content(self, parts: Sequence[str | Media], *, told: bool = False) -> Json:
        """The content of a message, as this chat has them: a text, or a list of parts. ``told``: what it spells of
        control tokens stays text."""
        shown = [self.texts.plain(part) if told and isinstance(part, str) else part for part in parts]
        if self.tokenizer is self.saved:
            return "".join(map(str, shown))
        return [{"type": "text", "text": p} if isinstance(p, str) else {"type": p.kind} for p in shown]

    def media(self, prompt: Prompt) -> tuple[list[Image], list[Clip]]:
        """The prompt's decoded pictures and clips."""
        return [], []

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


Conditioner: TypeAlias = "Chat[Tokenizer] | Chat[Processor]"
_KEY = "model.chat_template:"


def check_template(conditioner: Conditioner, recipe: Recipe) -> None:
    """Render a message with the chat template, and one below ``sampling.system``. Raises ``UserError`` where the
    template fails, or does not show them."""
    saved, variables = conditioner.saved, recipe.decoding.chat_template_kwargs
    named = getattr(saved, "chat_template", None)
    if isinstance(named, Mapping) and "default" not in named and "chat_template" not in variables:
        raise UserError(
            f"model.path: its chat templates are called {', '.join(sorted(named))}, and none default; choose one: "
            f"sampling.chat_template_kwargs={{chat_template: {min(named, default='NAME')}}}, or set model.chat_template"
        )
    key = "model.path: the chat template of the checkpoint:" if recipe.model.chat_template is None else _KEY
    try:
        conditioner.render(Prompt("p", "Hi"))
    except BadPromptError as error:
        fault = error.__cause__
        if isinstance(fault, TemplateFaultError) and fault.error is None:
            shown = fault.shown[:200]
            raise UserError(f"{key} of the message 'Hi' it makes {shown!r}, without its text; {MEND}") from error
        raise UserError(f"{key} rendering a message fails: {error.reason}") from error
    if recipe.decoding.system:
        try:
            conditioner.render(Prompt("p", "Hi", system=recipe.decoding.system))
        except BadPromptError as error:
            raise UserError(f"sampling.system: {error.reason}, or remove sampling.system") from error
