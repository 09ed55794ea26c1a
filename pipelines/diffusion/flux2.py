"""FLUX.2 dev (``Flux2Pipeline``): the scale of guidance is an input of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import loading
from .adapter import Read
from .flux2_klein import Flux2KleinAdapter


class Flux2Adapter(Flux2KleinAdapter):
    """FLUX.2-klein with a larger model, which ``sampling.guidance_scale`` is told, so that there is one prediction a
    step, and with another text encoder (Mistral), whose system message comes before every prompt."""

    family = "FLUX.2"
    pipeline = "Flux2Pipeline"
    fixed = {"guidance_embeds": (True,), "patch_size": (1,)}  # noqa: RUF012

    @property
    def combines(self) -> bool:
        return False

    def read(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        asked = format_input([text], self.pipe.system_message)
        ids = tokenizers["text_encoder"].apply_chat_template(asked, tokenize=True, return_dict=True)["input_ids"]
        return [Read(len(ids[0]), self.sampling.max_sequence_length)]


build, describe = loading.entry_points(Flux2Adapter)
