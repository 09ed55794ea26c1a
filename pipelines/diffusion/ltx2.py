"""LTX-2 (``LTX2Pipeline``): a text makes a clip with its sound.

A state is the tokens of the picture and then those of the sound, one after another in one tensor ``[B, D]``: both are
sampled at the same noise levels, recorded and trained together. Log-probs and losses are means over both, so that each
counts by its number of elements, and one advantage is for both. (OmniNFT, arXiv 2605.12480, has one for each;
Flow-Factory trains the picture alone.)

Guidance has a scale for each. diffusers combines predictions of the clean latents; both are linear in each other, so
that combining velocities is the same up to rounding. Its guidance by skipped blocks (``stg_scale``), by separated
streams (``modality_scale``) and its rescaling are not used, which the stock call is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import diffusers  # its parts are loaded when they are first used
import torch
from torch import Tensor, nn

from mmrl.config.sampling import Sampling
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json
from mmrl.core.transfer import to_device

from . import loading
from .adapter import Adapter, Read, by_channel
from .fields import Width, encoder_width, latent_channels
from .packed import shifted

_NOT_USED = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
_ATTENTION = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")


sounds = True
"""Clips of this family have a sound, which rewards may read."""


class _Size(NamedTuple):
    """The size of a sample's latents: frames, height and width of the picture, and the length of the sound."""

    frames: int
    height: int
    width: int
    sound: int


class LTX2Adapter(Adapter):
    """``sampling.guidance_scale`` is of the picture, ``sampling.audio_guidance_scale`` of the sound;
    without it both have the first."""

    makes = "video"
    family = "LTX-2"
    pipeline = "LTX2Pipeline"
    encoders = ("text_encoder",)
    connects = ("connectors",)
    sounds = ("audio_vae", "vocoder")
    unused = ("processor", "prompt_enhancer", "duration_head")
    fixed = dict.fromkeys(("patch_size", "patch_size_t", "audio_patch_size", "audio_patch_size_t"), (1,))
    lora_targets = tuple(
        sorted(
            [
                *(f"{name}.{layer}" for name in _ATTENTION for layer in ("to_k", "to_out.0", "to_q", "to_v")),
                *(f"{name}.net.{layer}" for name in ("ff", "audio_ff") for layer in ("0.proj", "2")),
            ]
        )
    )

    def __init__(self, pipe: diffusers.DiffusionPipeline, sampling: Sampling, device: torch.device) -> None:
        super().__init__(pipe, sampling, device)
        if (sampling.audio_guidance_scale or 1) > 1 >= sampling.guidance_scale:
            raise UserError(
                f"sampling.audio_guidance_scale: sampling.guidance_scale is {sampling.guidance_scale:g}, and without "
                "guidance of the picture the sound has none; set sampling.guidance_scale above 1, or remove "
                "audio_guidance_scale"
            )
        if len(sampling.sizes) > 1:
            raise UserError(
                "sampling.buckets: a sample of LTX-2 is a row of tokens, which does not say of which size its clip is; "
                "leave one size, or remove buckets"
            )
        registers = pipe.connectors.config.video_connector_num_learnable_registers or 1
        most = sampling.max_sequence_length
        if over := most % registers:
            raise UserError(
                f"sampling.max_sequence_length: {most} is no multiple of {registers}, by which this checkpoint's "
                f"connectors fill texts up; set it to {most - over + registers}"
            )

    @classmethod
    def widths(cls, pipe: diffusers.DiffusionPipeline) -> Iterator[Width]:
        config, channels = pipe.transformer.config, latent_channels(pipe)
        sound = pipe.audio_vae.config.latent_channels * _bins(pipe)
        for stream, needed in (("", channels), ("audio_", sound)):
            what = "sound" if stream else "latent"
            for name in (f"{stream}in_channels", f"{stream}out_channels"):
                yield name, config[name] or needed, needed, f"a VAE of {needed} {what} channels"
        if config["use_prompt_embeddings"]:
            yield encoder_width(pipe, "caption_channels", pipe.text_encoder)

    def read(self, text: str, tokenizers: Mapping[str, Any]) -> list[Read]:
        return self._reads(text.strip(), tokenizers["text_encoder"])

    def encode(self, text: str) -> dict[str, Tensor]:
        """``embeds`` and ``sound``, the states of the text ``[T, width]`` for each stream, and their ``mask``
        ``[T]``."""
        pipe, most = self.pipe, self.sampling.max_sequence_length
        states, read, *_ = pipe.encode_prompt(
            text, do_classifier_free_guidance=False, device=self.text_encoders[0].device, max_sequence_length=most
        )
        made = pipe.connectors(states, read, padding_side="left")
        return {name: one[0].to(self.device) for name, one in zip(("embeds", "sound", "mask"), made, strict=True)}

    @property
    def frame_rate(self) -> float:
        """Frames per second."""
        return self.sampling.frame_rate or 24.0

    def _size(self, height: int, width: int) -> _Size:
        pipe, space = self.pipe, self.pipe.vae_spatial_compression_ratio
        seconds = (self.sampling.frames or 1) / self.frame_rate
        rate = pipe.audio_sampling_rate / pipe.audio_hop_length / float(pipe.audio_vae_temporal_compression_ratio)
        frames = self._latent_frames(pipe.vae_temporal_compression_ratio)
        return _Size(frames, height // space, width // space, round(seconds * rate))

    @property
    def _own(self) -> _Size:
        return self._size(*self.sampling.size)

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        self._fits(height, width, max(32, self.pipe.vae_spatial_compression_ratio))  # diffusers' call wants 32
        frames, h, w, sound = self._size(height, width)
        if not sound:
            least = self.pipe.vae_temporal_compression_ratio + 1
            raise UserError(
                f"sampling.frames: so short a clip has no sound at {self.frame_rate:g} a second; use {least}"
            )
        config = self.pipe.transformer.config
        return (frames * h * w * config.in_channels + sound * config.audio_in_channels,)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens ``[B, N, C]`` of the picture and of the sound in states ``[B, D]``."""
        config, sound = self.pipe.transformer.config, self._own.sound
        cut = x.shape[1] - sound * config.audio_in_channels
        return x[:, :cut].unflatten(1, (-1, config.in_channels)), x[:, cut:].unflatten(1, (sound, -1))

    def modalities(self, states: Tensor) -> dict[str, Tensor]:
        return dict(zip(("video", "audio"), self.parts(states), strict=True))

    def predict(self, model: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        embeds, mask = features["embeds"], features["mask"]
        picture, sound = self.parts(x.to(embeds.dtype))
        made = model(
            hidden_states=picture,
            audio_hidden_states=sound,
            encoder_hidden_states=embeds,
            audio_encoder_hidden_states=features["sound"],
            **self._times(timestep),
            sigma=timestep,
            encoder_attention_mask=mask,
            audio_encoder_attention_mask=mask,
            **self._places(embeds),
            use_cross_timestep=True,
            return_dict=False,
        )
        return torch.cat([one.flatten(1) for one in made], 1)

    def _places(self, embeds: Tensor) -> dict[str, Tensor]:
        """The model's arguments for the places of its tokens, for as many rows as ``embeds`` has. They are made on the
        CPU: diffusers copies numbers to their device, and the host would wait in every step."""
        size, of, on = self._own, self.pipe.transformer, torch.device("cpu")
        found = {
            "video_coords": of.rope.prepare_video_coords(1, *size[:3], on, fps=self.frame_rate),
            "audio_coords": of.audio_rope.prepare_audio_coords(1, size.sound, on),
        }
        nothing = embeds.new_zeros(len(embeds), 1, 1, 1)  # in a plan it has no data, and what is made of it has none
        return {name: nothing + to_device(places, embeds.device) for name, places in found.items()}

    def _times(self, timestep: Tensor) -> dict[str, Tensor]:
        """The model's arguments for the times of its tokens."""
        return {"timestep": timestep}

    def scale(self, timestep: Tensor, scale: float) -> float | Tensor:
        of_sound = self.sampling.audio_guidance_scale
        if of_sound is None or scale != self.sampling.guidance_scale:
            return scale
        scales = torch.full(self.latent_shape(*self.sampling.size), scale, device=timestep.device)
        scales[-self._own.sound * self.pipe.transformer.config.audio_in_channels :] = of_sound
        return scales

    def decode(self, latents: Tensor) -> Tensor:
        """Clips ``[B, F, 3, H, W]`` in [-1, 1]."""
        vae, size = self.pipe.vae, self._own
        picture = self.parts(latents)[0].transpose(1, 2).unflatten(2, size[:3])
        mean, std = (by_channel(one, picture) for one in (vae.latents_mean, vae.latents_std))
        time = picture.new_zeros(len(picture)) if vae.config.timestep_conditioning else None
        return vae.decode(picture * std / vae.config.scaling_factor + mean, time, return_dict=False)[0].transpose(1, 2)

    def decode_sound(self, latents: Tensor) -> Tensor:
        spectrum = self._sound_as_given(self.parts(latents)[1]).unflatten(2, (-1, _bins(self.pipe))).transpose(1, 2)
        return self.pipe.vocoder(self.pipe.audio_vae.decode(spectrum, return_dict=False)[0])

    @property
    def sound_rate(self) -> int:
        return self.pipe.vocoder.config.output_sampling_rate

    def _sound_as_given(self, tokens: Tensor) -> Tensor:
        vae = self.pipe.audio_vae
        return tokens * vae.latents_std.to(tokens) + vae.latents_mean.to(tokens)

    def call(self) -> dict[str, Json]:
        scale = self.sampling.guidance_scale
        scales = {"guidance_scale": scale, "audio_guidance_scale": self.sampling.audio_guidance_scale or scale}
        return {
            "num_frames": self.sampling.frames or 1,
            "frame_rate": self.frame_rate,
            "max_sequence_length": self.sampling.max_sequence_length,
            **scales,
            **_NOT_USED,
            **{f"audio_{name}": value for name, value in _NOT_USED.items()},
        }

    def given_noise(self, noise: Tensor) -> dict[str, Tensor]:
        """The call takes the sound's as if it were no noise, and normalises it."""
        picture, sound = self.parts(noise)
        return {"latents": picture, "audio_latents": self._sound_as_given(sound)}

    def _spacing(self, steps: int) -> dict[str, Json]:
        frames, height, width, _ = self._own
        return shifted(self.pipe.scheduler, steps, frames * height * width)


def _bins(pipe: diffusers.DiffusionPipeline) -> int:
    """The height of a sound's latents."""
    return pipe.audio_vae.config.mel_bins // pipe.audio_vae_mel_compression_ratio


build, describe = loading.entry_points(LTX2Adapter)
