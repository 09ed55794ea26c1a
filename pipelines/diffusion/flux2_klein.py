"""FLUX.2-klein (``Flux2KleinPipeline``): base models, guided by two predictions, and distilled ones, by none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import diffusers  # its parts are loaded when they are first used
import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from mmrl.core.json_types import Json
from mmrl.core.transfer import to_device

from . import loading
from .adapter import Adapter, Read
from .fields import Width, text_width, vae_widths
from .packed import own_sigmas


class Flux2KleinAdapter(Adapter):
    """Latents are the VAE's in patches of 2 x 2, normalised by its batch norm: ``[128, H / 16, W / 16]``.

    A distilled checkpoint takes no guidance, whatever ``sampling.guidance_scale`` says, as in the stock pipeline.
    """

    family = "FLUX.2-klein"
    pipeline = "Flux2KleinPipeline"
    encoders = ("text_encoder",)
    fixed = {"guidance_embeds": (False,), "patch_size": (1,)}  # noqa: RUF012
    statistics = ("batch_norm_eps",)
    lora_targets = (  # Flow-Factory's choice
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_k",
        "attn.to_out.0",
        "attn.to_q",
        "attn.to_qkv_mlp_proj",
        "attn.to_v",
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
    )

    @classmethod
    def widths(cls, pipe: diffusers.DiffusionPipeline) -> Iterator[Width]:
        yield from vae_widths(pipe, cls.trains, "in_channels", "out_channels", times=4, may_lack=True)
        name, width = "joint_attention_dim", text_width(pipe.text_encoder)
        yield name, pipe.transformer.config[name], 3 * width, f"three states of width {width}"

    def read(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        tokenizer = tokenizers["text_encoder"]
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return self._reads(prompt, tokenizer)

    @property
    def combines(self) -> bool:
        return not self.pipe.config["is_distilled"]

    @property
    def _layers(self) -> tuple[int, ...]:
        """Whose states are the text's features: 9, 18 and 27 of the published encoders' 36; 10, 20 and 30 of 40."""
        count = self.pipe.text_encoder.config.get_text_config().num_hidden_layers
        return tuple(count * quarter // 4 for quarter in (1, 2, 3))

    def encode(self, text: str) -> dict[str, Tensor]:
        embeds, _ = self.pipe.encode_prompt(
            text,
            device=self.text_encoders[0].device,
            max_sequence_length=self.sampling.max_sequence_length,
            text_encoder_out_layers=self._layers,
        )
        return {"embeds": embeds[0].to(self.device)}

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        factor = 2 * self.pipe.vae_scale_factor
        self._fits(height, width, factor)
        return (self.pipe.transformer.config.in_channels, height // factor, width // factor)

    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        embeds, (rows, columns), source = features["embeds"], x.shape[2:], features.get("source")
        pictures = [x, *(() if source is None else source.unbind(1) if source.ndim == 5 else (source,))]
        tokens = [p.to(embeds.dtype).flatten(2).transpose(1, 2) for p in pictures]
        places = [_places(rows, columns, 1, 10 * i) for i in range(len(pictures))]  # 10: as the stock pipeline counts
        told = self.pipe.transformer.config.guidance_embeds
        v = model(
            hidden_states=torch.cat(tokens, 1),
            timestep=timestep / 1000,
            guidance=torch.full_like(timestep, self.sampling.guidance_scale) if told else None,
            encoder_hidden_states=embeds,
            txt_ids=to_device(_places(1, 1, embeds.shape[1])[None], embeds.device),
            img_ids=to_device(torch.cat(places)[None], embeds.device),
            return_dict=False,
        )[0]
        return v[:, : rows * columns].transpose(1, 2).unflatten(2, (rows, columns))

    def decode(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics()
        return self.pipe.vae.decode(pixel_shuffle(latents * std + mean, 2), return_dict=False)[0]

    def encode_image(self, pixels: Tensor) -> Tensor:
        mean, std = self._statistics()
        return (pixel_unshuffle(self.pipe.vae.encode(pixels).latent_dist.mode(), 2) - mean) / std

    def call(self) -> dict[str, Json]:
        length = self.sampling.max_sequence_length
        return super().call() | {"max_sequence_length": length, "text_encoder_out_layers": self._layers}

    def call_negative(self, text: str) -> dict[str, str]:
        # The stock call takes a negative prompt as embeddings alone.
        said, length = super().call_negative(text)["negative_prompt"], self.sampling.max_sequence_length
        code = f"pipe.encode_prompt({said}, max_sequence_length={length}, text_encoder_out_layers={self._layers})[0]"
        return {"negative_prompt_embeds": code}

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of patches, ``[1, 128, 1, 1]`` each."""
        vae = self.pipe.vae
        mean, variance = (v.view(1, -1, 1, 1) for v in (vae.bn.running_mean, vae.bn.running_var))
        return mean, (variance + vae.config.batch_norm_eps).sqrt()

    def _spacing(self, steps: int) -> dict[str, Json]:
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        _, height, width = self.latent_shape(self.sampling.height, self.sampling.width)
        sigmas = torch.linspace(1.0, 1 / steps, steps, dtype=torch.float64).tolist()
        spacing: dict[str, Json] = {"sigmas": sigmas, "mu": compute_empirical_mu(height * width, steps)}
        return own_sigmas(self.pipe.scheduler, spacing)


def _places(rows: int, columns: int, tokens: int, picture: int = 0) -> Tensor:
    """Where tokens are: picture, row, column and place in a text, ``[rows * columns * tokens, 4]``."""
    ranges = (torch.arange(n) for n in (rows, columns, tokens))
    return torch.cartesian_prod(torch.tensor([picture]), *ranges)


build, describe = loading.entry_points(Flux2KleinAdapter)
