"""Sana (``SanaPipeline``): linear attention over latents that are 32 times smaller than the picture."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import diffusers  # its parts are loaded when they are first used
from torch import Tensor, nn

from mmrl.core.json_types import Json

from . import loading
from .adapter import Read
from .euler import EulerAdapter
from .fields import Width, encoder_width, vae_widths


class SanaAdapter(EulerAdapter):
    """Final class. Sizes are taken as they are: the stock pipeline's binning of resolutions is off."""

    family = "Sana"
    pipeline = "SanaPipeline"
    encoders = ("text_encoder",)
    fixed = {"guidance_embeds": (False,), "qk_norm": (None, "rms_norm_across_heads")}  # noqa: RUF012
    lora_targets = (
        "attn1.to_k",
        "attn1.to_out.0",
        "attn1.to_q",
        "attn1.to_v",
        "attn2.to_k",
        "attn2.to_out.0",
        "attn2.to_q",
        "attn2.to_v",
    )

    @classmethod
    def widths(cls, pipe: diffusers.DiffusionPipeline) -> Iterator[Width]:
        config = pipe.transformer.config
        yield from vae_widths(pipe, cls.trains, "in_channels", "out_channels", may_lack=True)
        inner = config["num_attention_heads"] * config["attention_head_dim"]
        yield "cross_attention_dim", config["cross_attention_dim"], inner, f"attention of width {inner}"
        yield encoder_width(pipe, "caption_channels", pipe.text_encoder)

    def read(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        tokenizer, before = tokenizers["text_encoder"], "\n".join(self._instruction)
        ids = tokenizer(before + text.lower().strip(), verbose=False).input_ids
        return [Read(len(ids), len(tokenizer.encode(before)) + self.sampling.max_sequence_length - 2)]

    def read_negative(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        return self._reads(text.lower().strip(), tokenizers["text_encoder"])

    @property
    def _instruction(self) -> list[str]:
        """What the stock call puts before every prompt, and never before the negative one."""
        return inspect.signature(type(self.pipe).__call__).parameters["complex_human_instruction"].default

    def encode(self, text: str) -> dict[str, Tensor]:
        return self._encoded(text, None if text == self.negative else self._instruction)

    def encode_negative(self, text: str) -> dict[str, Tensor]:
        return self._encoded(text, None)

    def _encoded(self, text: str, instruction: list[str] | None) -> dict[str, Tensor]:
        embeds, mask, _, _ = self.pipe.encode_prompt(
            text,
            do_classifier_free_guidance=False,
            device=self.text_encoders[0].device,
            max_sequence_length=self.sampling.max_sequence_length,
            complex_human_instruction=instruction,
        )
        return {"embeds": embeds[0].to(self.device), "mask": mask[0].to(self.device)}

    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        return model(
            x.to(features["embeds"].dtype),
            encoder_hidden_states=features["embeds"],
            encoder_attention_mask=features["mask"],
            timestep=timestep * self.pipe.transformer.config.timestep_scale,
            return_dict=False,
        )[0]

    def encode_image(self, pixels: Tensor) -> Tensor:
        return self.pipe.vae.encode(pixels).latent * self.pipe.vae.config.scaling_factor

    def call(self) -> dict[str, Json]:
        length = self.sampling.max_sequence_length
        return super().call() | {"max_sequence_length": length, "use_resolution_binning": False}


build, describe = loading.entry_points(SanaAdapter)
