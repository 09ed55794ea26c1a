"""Z-Image and Z-Image-Turbo (``ZImagePipeline``): one stream of tokens, a picture's before those of its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import diffusers  # its parts are loaded when they are first used
import torch
from torch import Tensor, nn

from mmrl.core.json_types import Json

from . import loading
from .adapter import Adapter, Read
from .fields import Width, encoder_width, vae_widths
from .packed import shifted


class ZImageAdapter(Adapter):
    """Final class. ``sampling.guidance_scale`` is one more than the stock pipeline's, which adds its own times the
    difference to the prediction with the prompt: 1 is no guidance (the stock 0, as Turbo wants it), here as in every
    family."""

    family = "Z-Image"
    pipeline = "ZImagePipeline"
    encoders = ("text_encoder",)
    fixed = {"siglip_feat_dim": (None,)}  # noqa: RUF012
    statistics = ("scaling_factor", "shift_factor")
    lora_targets = (  # Flow-Factory's choice
        "attention.to_k",
        "attention.to_out.0",
        "attention.to_q",
        "attention.to_v",
        "feed_forward.w1",
        "feed_forward.w2",
        "feed_forward.w3",
    )

    @classmethod
    def widths(cls, pipe: diffusers.DiffusionPipeline) -> Iterator[Width]:
        config = pipe.transformer.config
        yield from vae_widths(pipe, cls.trains, "in_channels")
        yield encoder_width(pipe, "cap_feat_dim", pipe.text_encoder)
        yield "all_patch_size", 2 in config["all_patch_size"], True, "patches of 2 x 2"
        yield "all_f_patch_size", 1 in config["all_f_patch_size"], True, "one frame"

    def read(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        tokenizer = tokenizers["text_encoder"]
        return self._reads(self._prompt(text, tokenizer), tokenizer)

    def _prompt(self, text: str, tokenizer: Any) -> str:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )

    def encode(self, text: str) -> dict[str, Tensor]:
        encoder, most = self.text_encoders[0], self.sampling.max_sequence_length
        prompt = self._prompt(text, self.pipe.tokenizer)
        tokens = self.pipe.tokenizer(
            [prompt], max_length=most, padding="max_length", truncation=True, return_tensors="pt"
        )
        ids, mask = tokens.input_ids.to(encoder.device), tokens.attention_mask.to(encoder.device)
        states = encoder(input_ids=ids, attention_mask=mask.bool(), output_hidden_states=True).hidden_states[-2]
        embeds = states[0, mask[0].nonzero()[:, 0]]
        length = torch.tensor(len(embeds))  # of a text; what comes after it makes all shapes alike, and is never read
        embeds = nn.functional.pad(embeds, (0, 0, 0, most - len(embeds)))
        return {"embeds": embeds.to(self.device), "length": length}

    @property
    def patch(self) -> int:
        return 2

    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        embeds = features["embeds"]
        texts = [row[:length] for row, length in zip(embeds, features["length"].tolist(), strict=True)]
        latents = list(x.to(embeds.dtype).unsqueeze(2))  # with one frame each
        toward_data = model(latents, (1000 - timestep) / 1000, texts, return_dict=False)[0]
        return -torch.stack(toward_data).squeeze(2)

    def call(self) -> dict[str, Json]:
        stock = max(0.0, self.sampling.guidance_scale - 1)
        return {"guidance_scale": stock, "max_sequence_length": self.sampling.max_sequence_length}

    def _spacing(self, steps: int) -> dict[str, Json]:
        _, height, width = self.latent_shape(self.sampling.height, self.sampling.width)
        return shifted(self.pipe.scheduler, steps, height // 2 * (width // 2))


build, describe = loading.entry_points(ZImageAdapter)
