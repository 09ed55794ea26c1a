"""Emu3 (Wang et al. 2024, arXiv 2409.18869): a language model that writes pictures as tokens, decoded by its VQ model.

The policy is transformers' ``Emu3ForConditionalGeneration``, whose text model trains; the VQ model in it is frozen. A
prompt is what Emu3's processor makes of it for drawing: its text, then the start of a picture and the numbers of its
rows and columns. ``mmrl.models.text.written_pictures`` has the frame of tokens, guidance, and whose log-probs are
trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mmrl.config.sampling import Picture
from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.library_loading import check_tokens, refused, try_tokenizer
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt
from mmrl.families.text.assembly import Load, build_writer, describe_writer
from mmrl.families.text.pipeline import LanguagePipeline
from mmrl.models.description import Description
from mmrl.models.text import chat
from mmrl.models.text.conditioner import Messages, Processor
from mmrl.models.text.written_pictures import Frame

if TYPE_CHECKING:  # slow to import
    from transformers import Emu3Processor, PreTrainedModel

OTHERWISE = "Set pipeline: llm/chat for a model of text alone, vlm/chat for one that sees pictures and writes text."
TESTED = ("emu3",)
VQ = "vqmodel"
END_OF_ROW = "<|extra_200|>"


class Drawn(chat.Chat[Processor]):
    """Final class; see ``mmrl.models.text.chat.Chat``. A text, and then a picture of ``frame``; ``negative_prompt``: of
    prompts that have none of their own."""

    no_pictures = "the model draws one, and is shown none"

    def __init__(self, saved: Processor, stop: list[int], frame: Frame, negative_prompt: str | None) -> None:
        self._processor, self.frame = cast("Emu3Processor", saved), frame
        super().__init__(saved, stop, {})
        self._negative = lru_cache(4096)(lambda text: self._tokens(Prompt("negative", text), adds=False))
        self._negative_prompt = negative_prompt

    def encode(self, prompt: Prompt) -> dict[str, Tensor]:
        if prompt.media or prompt.turns or prompt.system:
            raise BadPromptError(prompt.id, "the model draws what one text says; take pictures, turns and system out")
        if prompt.max_new_tokens is not None:
            raise BadPromptError(prompt.id, "all pictures have one number of tokens; take max_new_tokens out")
        return self._tokens(prompt, adds=False)

    def negative(self, prompt: Prompt) -> dict[str, Tensor]:
        own = prompt.negative_prompt
        return self._negative((self._negative_prompt or "") if own is None else own)

    def _rendered(
        self, prompt: Prompt, answer: JsonObject | None = None, behind: Messages = (), *, asks: bool = True
    ) -> str:
        names, frame = self._processor, self.frame
        assert frame is not None
        begun = f"{names.image_start_token}{frame.height}*{frame.width}{names.fake_token_around_image}"
        return f"{names.bos_token}{prompt.text}{begun}"


def build(recipe: Recipe, path: str, device: torch.device) -> LanguagePipeline:
    """Load the model and processor at ``path``. Raises ``UserError`` where they cannot draw what the recipe says."""
    return build_writer(_parts, _frozen(recipe), path, device, sees=False)


def describe(recipe: Recipe, path: str, architecture: Path | None) -> Description:
    """The pipeline that ``build`` would make, on the meta device. Raises ``UserError`` as ``build`` does."""
    return describe_writer(_parts, _frozen(recipe), path, architecture)


def _frozen(recipe: Recipe) -> Recipe:
    """``recipe`` with the VQ model among what does not train."""
    model = recipe.model.model_copy(update={"freeze": [*recipe.model.freeze, VQ]})
    return recipe.model_copy(update={"model": model})


def _parts(recipe: Recipe, path: str, load: Load) -> tuple[Drawn, PreTrainedModel]:
    allow_cpu_only()  # transformers imports torchvision wherever it is installed
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    with refused(lambda reason: f"model.path: {path} has no processor that can be used: {reason}"):
        processor = AutoProcessor.from_pretrained(path)
        config = AutoConfig.from_pretrained(path)
        kind = config.model_type
        if kind == "emu3":
            try_tokenizer(processor.tokenizer)
            check_tokens(processor.tokenizer, config)
    if kind != "emu3":
        raise UserError(f"model.path: {path} is a model of type {kind}, and llm/emu3 is for emu3\n  {OTHERWISE}")
    picture = recipe.decoding.picture
    if picture is None:
        raise UserError("sampling.picture: this model writes pictures; set it to {height: 512, width: 512}")
    frame = _frame(recipe, picture, processor, config.vocabulary_map or {}, len(config.vq_config.channel_multiplier))
    model = load(AutoModelForImageTextToText, recipe, path, TESTED, OTHERWISE)
    return Drawn(processor, [frame.ends[-1]], frame, picture.negative_prompt), model


def _frame(recipe: Recipe, picture: Picture, processor: Emu3Processor, known: Mapping[str, int], levels: int) -> Frame:
    """The frame of the recipe's pictures. ``known``: the model's ``vocabulary_map``; ``levels``: of the VQ model, each
    but one halves a picture. Raises ``UserError`` for a size that it cannot make."""
    factor = 2 ** (levels - 1)
    for key, pixels in (("height", picture.height), ("width", picture.width)):
        if pixels % factor:
            raise UserError(
                f"sampling.picture.{key}: the VQ model makes {factor} pixels of a token, and {pixels} is no multiple "
                f"of that; set it to {max(factor, round(pixels / factor) * factor)}"
            )
    codes, end = [n for name, n in known.items() if name.startswith("<|visual token")], processor.tokenizer.eos_token_id
    if not codes or END_OF_ROW not in known or end is None:
        raise UserError(
            f"model.path: its vocabulary_map has no <|visual token ...|> or no {END_OF_ROW}, or its tokenizer no end "
            "of text; take a checkpoint that draws, such as Emu3-Gen"
        )
    number = processor.tokenizer.convert_tokens_to_ids
    frame = Frame(
        picture.height // factor,
        picture.width // factor,
        codes,
        known[END_OF_ROW],
        [number(processor.eof_token), number(processor.image_end_token), end],
        picture.guidance_scale,
        processor.image_processor.image_mean,
        processor.image_processor.image_std,
    )
    if recipe.decoding.max_new_tokens != frame.tokens:
        raise UserError(
            f"sampling.max_new_tokens: a picture of {picture.height} x {picture.width} pixels is {frame.tokens} tokens "
            f"of this model ({frame.height} rows of {frame.width} and an end, and {len(frame.ends)} behind them); set "
            f"it to {frame.tokens}"
        )
    return frame
