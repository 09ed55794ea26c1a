"""HunyuanVideo 1.5 text-to-video (``HunyuanVideo15Pipeline``): clips, guided by two predictions.

The model is given the noisy latents, those of a known first frame, and a mask that marks it, joined by channel; from a
text alone the last two are 0. It is made to be shown a picture, too: here one token of zeros where the stock call has
729, for the model masks them all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import diffusers  # its parts are loaded when they are first used
import torch
from torch import Tensor, nn

from mmrl.config.sampling import Sampling
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json

from . import loading
from .adapter import Adapter, Read
from .fields import Width, encoder_width, latent_channels, not_default

_LENGTH = 1000
"""Tokens of text that the stock pipeline reads."""


class HunyuanVideo15Adapter(Adapter):
    """Texts in quotes are read by a second encoder, letter by letter, for the model to write them.

    ``sampling.guidance_scale`` is that of the pipeline's ``guider``, whose own scale is not used.
    ``sampling.max_sequence_length`` counts the tokens of the prompt and of the template's end. Padding is masked, so
    that less of it than the stock pipeline's 1000 tokens gives the same up to rounding.
    """

    makes = "video"
    masks = True
    family = "HunyuanVideo 1.5"
    pipeline = "HunyuanVideo15Pipeline"
    encoders = ("text_encoder", "text_encoder_2")
    guider = "guider"
    fixed = {"use_meanflow": (False,)}  # noqa: RUF012
    lora_targets = (  # UniRL's choice
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_k",
        "attn.to_out.0",
        "attn.to_q",
        "attn.to_v",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )

    def __init__(self, pipe: diffusers.DiffusionPipeline, sampling: Sampling, device: torch.device) -> None:
        super().__init__(pipe, sampling, device)
        _check_guider(pipe.guider)
        pipe.tokenizer_max_length = sampling.max_sequence_length
        pipe.vae.use_slicing = True  # diffusers' mask of its attention is of one clip

    @classmethod
    def widths(cls, pipe: diffusers.DiffusionPipeline) -> Iterator[Width]:
        config, channels = pipe.transformer.config, latent_channels(pipe)
        of_vae = f"a VAE of {channels} latent channels"
        yield "in_channels", config["in_channels"], 2 * channels + 1, of_vae
        yield "out_channels", config["out_channels"] or config["in_channels"], channels, of_vae
        yield encoder_width(pipe, "text_embed_dim", pipe.text_encoder)
        yield encoder_width(pipe, "text_embed_2_dim", pipe.text_encoder_2)
        yield "patch_size_t", config["patch_size_t"], 1, "frames that are apart"

    def weights_without_gradient(self) -> dict[str, str]:
        last = f"transformer_blocks.{self.model.config['num_layers'] - 1}"  # type: ignore[index]
        why = "the last block's text is dropped"
        return {f"{last}.attn.to_add_out": why, f"{last}.ff_context": why}

    def read(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        asked = [{"role": "system", "content": self.pipe.system_message}, {"role": "user", "content": text or " "}]
        tokenizer = tokenizers["text_encoder"]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        return self._reads(prompt, tokenizer, self.pipe.prompt_template_encode_start_idx)

    def encode(self, text: str) -> dict[str, Tensor]:
        embeds, mask, quoted, quoted_mask = self.pipe.encode_prompt(text, device=self.text_encoders[0].device)
        states = {"embeds": embeds, "mask": mask.bool(), "quoted": quoted, "quoted_mask": quoted_mask.bool()}
        return {name: state[0].to(self.device) for name, state in states.items()}

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        space = self.pipe.vae_scale_factor_spatial
        self._fits(height, width, self.pipe.transformer.config.patch_size * space)
        frames = self._latent_frames(self.pipe.vae_scale_factor_temporal)
        return (self.pipe.num_channels_latents, frames, height // space, width // space)

    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        embeds = features["embeds"]
        known, seen = self._condition(x, features)
        return model(
            hidden_states=torch.cat([x, known], 1).to(embeds.dtype),
            timestep=timestep.to(embeds.dtype),
            encoder_hidden_states=embeds,
            encoder_attention_mask=features["mask"],
            encoder_hidden_states_2=features["quoted"],
            encoder_attention_mask_2=features["quoted_mask"],
            image_embeds=seen.to(embeds.dtype),
            return_dict=False,
        )[0]

    def _condition(self, x: Tensor, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What the model is given of a picture beside ``x``: channels ``[B, C + 1, F, h, w]`` and states
        ``[B, T, width]`` of an image encoder."""
        none = torch.zeros(len(x), 1, self.pipe.vision_states_dim, device=self.device)
        return x.new_zeros(len(x), x.shape[1] + 1, *x.shape[2:]), none

    def call(self) -> dict[str, Json]:
        return {"num_frames": self.sampling.frames or 1}

    @property
    def prepare(self) -> str:
        length, scale = self.sampling.max_sequence_length, self.sampling.guidance_scale
        cut = f"pipe.tokenizer_max_length = {length}\n" if length != _LENGTH else ""
        return f"{super().prepare}pipe.guider = pipe.guider.new(guidance_scale={scale})\n{cut}"

    def _spacing(self, steps: int) -> dict[str, Json]:
        return {"sigmas": torch.linspace(1, 0, steps + 1, dtype=torch.float64)[:-1].tolist()}


def _check_guider(guider: Any) -> None:
    """Raises ``UserError`` where the checkpoint's guidance is another than a scale times a difference."""
    for name, value, default in not_default(guider, ("guidance_scale",)):
        raise UserError(
            f"model.path: guider/guider_config.json says {name}: {json.dumps(value)}, and guidance here is at every "
            f"step of sampling, by sampling.guidance_scale; write {json.dumps(default)} for it"
        )


build, describe = loading.entry_points(HunyuanVideo15Adapter)
