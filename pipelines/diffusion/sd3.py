"""Stable Diffusion 3 and 3.5 (``StableDiffusion3Pipeline``): how to encode, predict and decode, and what takes LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from mmrl.config.schema import Recipe
from mmrl.errors import UserError
from mmrl.placement.description import Component, Description, Phase

from .describe import empty_pipeline
from .flow import FlowPipeline

LORA_TARGETS = [
    "attn.add_k_proj",
    "attn.add_q_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "attn.to_k",
    "attn.to_out.0",
    "attn.to_q",
    "attn.to_v",
]
"""Flow-GRPO's choice for SD3.5."""


class SD3Adapter:
    """Final class; see ``mmrl.pipelines.diffusion.flow.Adapter``. Works on a loaded diffusers pipeline."""

    def __init__(self, pipe: Any, max_sequence_length: int, device: torch.device) -> None:
        self.pipe, self.device, self.max_sequence_length = pipe, device, max_sequence_length
        self.transformer: nn.Module = pipe.transformer
        encoders = (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)
        self.text_encoders: list[nn.Module] = [e for e in encoders if e is not None]
        self.vae: nn.Module = pipe.vae
        self._schedules: dict[int, tuple[Tensor, Tensor]] = {}

    def encode(self, text: str) -> dict[str, Tensor]:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            text,
            None,
            None,
            device=self.text_encoders[0].device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"embeds": embeds[0].to(self.device), "pooled": pooled[0].to(self.device)}

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        channels, factor = self.pipe.transformer.config.in_channels, self.pipe.vae_scale_factor
        multiple = factor * self.pipe.transformer.config.patch_size
        if height % multiple or width % multiple:
            raise UserError(
                f"sampling.height and sampling.width: {height} x {width} is no multiple of {multiple}, which this "
                f"checkpoint's VAE and patches need; use {_near(height, multiple)} x {_near(width, multiple)}"
            )
        largest = self.pipe.transformer.config.pos_embed_max_size * multiple
        if max(height, width) > largest:
            raise UserError(
                f"sampling.height and sampling.width: {height} x {width} is more than the {largest} pixels a side that "
                f"this checkpoint has positions for; use {min(height, largest)} x {min(width, largest)} or less"
            )
        return (channels, height // factor, width // factor)

    def schedule(self, steps: int) -> tuple[Tensor, Tensor]:
        if steps not in self._schedules:
            scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
            scheduler.set_timesteps(steps)
            self._schedules[steps] = (scheduler.sigmas, scheduler.timesteps)
        return self._schedules[steps]

    def timestep(self, sigma: Tensor) -> Tensor:
        return sigma * self.pipe.scheduler.config.num_train_timesteps

    def predict(self, transformer: nn.Module, x: Tensor, timestep: Tensor, features: dict[str, Tensor]) -> Tensor:
        dtype = features["embeds"].dtype
        return transformer(
            hidden_states=x.to(dtype),
            timestep=timestep,
            encoder_hidden_states=features["embeds"],
            pooled_projections=features["pooled"],
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor) -> Tensor:
        config = self.pipe.vae.config
        return self.pipe.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]


def build(recipe: Recipe, path: str, device: torch.device) -> FlowPipeline:
    """Load the checkpoint at ``path`` and put what trains on ``device``.

    Frozen weights take ``model.dtype``; the VAE stays float32, for a half-precision VAE clips bright pictures. Raises
    ``UserError`` where the directory is no Stable Diffusion 3 or the picture size does not fit it.
    """
    pipe = _load(recipe, path)
    pipeline = _assemble(pipe, recipe, device)
    pipeline.policy.to(device)
    if not recipe.model.offload or device.type == "cpu":
        for module in (*pipeline.adapter.text_encoders, pipe.vae):
            module.to(device)
    return pipeline


def describe(recipe: Recipe, path: str, architecture: Path | None) -> Description:
    """The pipeline that ``build`` would make, on the meta device: from the checkpoint's configuration files, or from
    the ``architecture`` file where they cannot be read. Raises ``UserError`` as ``build`` does."""
    pipe, source = empty_pipeline(path, architecture, _dtypes(recipe))
    pipeline = _assemble(pipe, recipe, torch.device("cpu"))
    encoders = [
        Component("text encoders", type(e).__name__, e, frozenset({"encode"})) for e in pipeline.adapter.text_encoders
    ]
    return Description(
        pipeline,
        [
            Component("policy", type(pipe.transformer).__name__, pipeline.policy, frozenset(get_args(Phase))),
            *encoders,
            Component("VAE", type(pipe.vae).__name__, pipe.vae, frozenset({"decode"})),
        ],
        source,
    )


def _assemble(pipe: Any, recipe: Recipe, device: torch.device) -> FlowPipeline:
    """From components, wherever they are, to the pipeline with what trains opened."""
    for module in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
        if module is not None:
            module.requires_grad_(False).eval()  # a fresh T5 is in training mode, with dropout
    adapter = SD3Adapter(pipe, recipe.denoising.max_sequence_length, device)
    adapter.latent_shape(recipe.denoising.height, recipe.denoising.width)
    if recipe.model.gradient_checkpointing:
        pipe.transformer.enable_gradient_checkpointing()
    return FlowPipeline(adapter, _trainable(pipe.transformer, recipe), recipe, device)


def _dtypes(recipe: Recipe) -> dict[str, torch.dtype]:
    frozen = getattr(torch, recipe.model.dtype)
    return {"default": frozen, "vae": torch.float32, "transformer": frozen if recipe.model.lora else torch.float32}


def _load(recipe: Recipe, path: str) -> Any:
    import diffusers.utils.logging
    import transformers.utils.logging
    from diffusers import StableDiffusion3Pipeline

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()  # one for each of nine components
    try:
        index: Any = StableDiffusion3Pipeline.load_config(path)
        missing = {
            name: None
            for name in ("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor")
            if (index[name][0] is None if name in index else name.endswith("_3"))
        }
        return StableDiffusion3Pipeline.from_pretrained(path, dtype=_dtypes(recipe), **missing)
    except (OSError, ValueError, TypeError) as error:
        where = f"the directory {path}" if Path(path).exists() else f"{path!r} (no such directory here)"
        raise UserError(
            f"model.path: {where} cannot be loaded as a Stable Diffusion 3 pipeline: {error}\n"
            "  Give a directory with model_index.json as diffusers saves it, or a hub name while online."
        ) from error


def _trainable(transformer: Any, recipe: Recipe) -> nn.Module:
    """Add LoRA, or open all weights; what trains is float32."""
    lora = recipe.model.lora
    if lora is None:
        return transformer.requires_grad_(True)
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(recipe.seed)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        init_lora_weights="gaussian" if lora.init == "gaussian" else True,
        target_modules=lora.targets or LORA_TARGETS,
    )
    try:
        policy = get_peft_model(transformer, config)
    except ValueError as error:
        raise UserError(
            f"model.lora.targets: {error}\n  Leave model.lora.targets out to take the pipeline's own list."
        ) from error
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return policy


def _near(size: int, multiple: int) -> int:
    return max(multiple, round(size / multiple) * multiple)
