"""Qwen-Image (``QwenImagePipeline``): guidance by two predictions, their length kept as that with the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import diffusers  # its parts are loaded when they are first used
import torch
from torch import Tensor, nn

from mmrl.core.json_types import Json

from . import loading
from .adapter import Read
from .fields import Width, encoder_width, vae_widths
from .packed import PackedAdapter, packed, unpacked


class QwenImageAdapter(PackedAdapter):
    """``sampling.guidance_scale`` is the stock pipeline's ``true_cfg_scale``.

    Departs from the stock pipeline: a prompt's features are padded to ``sampling.max_sequence_length`` and masked, so
    that rows of any prompts, and the negative one's, make one batch.
    """

    family = "Qwen-Image"
    pipeline = "QwenImagePipeline"
    encoders = ("text_encoder",)
    fixed = {  # noqa: RUF012
        "patch_size": (2,),
        "guidance_embeds": (False,),
        "use_additional_t_cond": (False,),
        "use_layer3d_rope": (False,),
    }
    statistics = ("latents_mean", "latents_std")
    negative = " "
    lora_targets = (
        "add_k_proj",
        "add_q_proj",
        "add_v_proj",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "to_add_out",
        "to_k",
        "to_out.0",
        "to_q",
        "to_v",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )

    @classmethod
    def widths(cls, pipe: diffusers.DiffusionPipeline) -> Iterator[Width]:
        yield from vae_widths(pipe, cls.trains, "in_channels", times=4)
        yield from vae_widths(pipe, cls.trains, "out_channels")
        yield encoder_width(pipe, "joint_attention_dim", pipe.text_encoder)

    def weights_without_gradient(self) -> dict[str, str]:
        last = f"transformer_blocks.{self.model.config['num_layers'] - 1}"  # type: ignore[index]
        why = "the last block's text is dropped"
        return {f"{last}.attn.to_add_out": why, f"{last}.txt_mlp": why}

    def read(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        asked = self.pipe.prompt_template_encode.format(text)
        return self._reads(asked, tokenizers["text_encoder"], self.pipe.prompt_template_encode_start_idx)

    def encode(self, text: str) -> dict[str, Tensor]:
        length = self.pipe.prompt_template_encode_start_idx + self.sampling.max_sequence_length
        prompt = self.pipe.prompt_template_encode.format(text)
        tokens = self.pipe.tokenizer(
            [prompt], max_length=length, padding="max_length", truncation=True, return_tensors="pt"
        )
        return self._features(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)

    def _features(self, **read: Tensor) -> dict[str, Tensor]:
        """The last states of what the text encoder ``read``, without those of the template's beginning."""
        encoder: Any = self.text_encoders[0]
        begins = self.pipe.prompt_template_encode_start_idx
        given = {name: tensor.to(encoder.device) for name, tensor in read.items()}
        states = encoder(**given, output_hidden_states=True).hidden_states[-1]
        mask = given["attention_mask"][0, begins:]
        embeds = states[0, begins:] * mask.unsqueeze(1).to(states.dtype)
        return {"embeds": embeds.to(self.device), "mask": mask.to(self.device)}

    def guide(self, negative: Tensor, positive: Tensor, scale: float | Tensor) -> Tensor:
        combined = packed(super().guide(negative, positive, scale))
        length = packed(positive).norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True)
        return unpacked(combined * length, tuple(positive.shape[1:]))

    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        source = features.get("source")
        given = () if source is None else source.unbind(1) if source.ndim == 5 else (source,)  # several, or one
        pictures = [x, *given]
        tokens = [packed(picture.to(features["embeds"].dtype)) for picture in pictures]
        v = model(
            hidden_states=torch.cat(tokens, 1),
            timestep=timestep / 1000,
            encoder_hidden_states=features["embeds"],
            encoder_hidden_states_mask=features["mask"],
            img_shapes=[[(1, one.shape[2] // 2, one.shape[3] // 2) for one in pictures]] * len(x),
            return_dict=False,
        )[0]
        return unpacked(v[:, : tokens[0].shape[1]], tuple(x.shape[1:]))

    def decode(self, latents: Tensor) -> Tensor:
        return super().decode(latents.unsqueeze(2))[:, :, 0]  # its VAE is of clips

    def encode_image(self, pixels: Tensor) -> Tensor:
        return super().encode_image(pixels.unsqueeze(2))[:, :, 0]

    def call(self) -> dict[str, Json]:
        return {
            "negative_prompt": self.negative,
            "true_cfg_scale": self.sampling.guidance_scale,
            "max_sequence_length": self.sampling.max_sequence_length,
        }


build, describe = loading.entry_points(QwenImageAdapter)
