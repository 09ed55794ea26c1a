"""Stable Diffusion 3 from its numbers alone: every component the real class, on the meta device, no weight read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mmrl.errors import UserError
from mmrl.placement.hub import file_of, unreadable

TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
FILES = {name: f"{name}/config.json" for name in ("transformer", "vae", *TEXT_ENCODERS)} | {
    "scheduler": "scheduler/scheduler_config.json"
}


def empty_pipeline(path: str, architecture: Path | None, dtypes: Mapping[str, torch.dtype]) -> tuple[Any, str]:
    """A ``StableDiffusion3Pipeline`` without weights, and a sentence on where its sizes come from.

    ``path`` is a directory or a hub name; where its configuration files cannot be read, the ``architecture`` file is.
    ``dtypes`` by component, with a ``default``. Raises ``UserError``.
    """
    configs, source = _configurations(path, architecture)
    try:
        return _assemble(configs, dtypes), source
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"model.path: {source} does not describe a Stable Diffusion 3 ({type(error).__name__}: {error})\n"
            "  Give a checkpoint of StableDiffusion3Pipeline, or another pipeline."
        ) from error


def _assemble(configs: dict[str, dict[str, Any]], dtypes: Mapping[str, torch.dtype]) -> Any:
    from accelerate import init_empty_weights

    diffusers: Any = import_module("diffusers")  # its lazy names, and a tokenizer's stand-in, mean nothing to a checker

    def dtype(name: str) -> torch.dtype:
        return dtypes.get(name, dtypes["default"])

    with init_empty_weights(include_buffers=True):
        transformer = diffusers.SD3Transformer2DModel.from_config(configs["transformer"])
        vae = diffusers.AutoencoderKL.from_config(configs["vae"])
        encoders = {name: _text_encoder(configs[name]) for name in TEXT_ENCODERS if name in configs}
    for name, encoder in encoders.items():
        encoder.to(dtype(name))
        if dtype(name) == torch.float16:  # what transformers keeps in float32 where half precision overflows
            for part, parameter in encoder.named_parameters():
                if any(f".{kept}." in part for kept in encoder._keep_in_fp32_modules or ()):
                    parameter.data = parameter.data.float()
    scheduler = configs["scheduler"]
    lengths = {name: e.config.max_position_embeddings for name, e in encoders.items() if name != "text_encoder_3"}
    return diffusers.StableDiffusion3Pipeline(
        transformer=_cast(transformer, dtype("transformer")),
        vae=_cast(vae, dtype("vae")),
        scheduler=getattr(diffusers, scheduler["_class_name"]).from_config(scheduler),
        text_encoder=encoders["text_encoder"],
        text_encoder_2=encoders["text_encoder_2"],
        text_encoder_3=encoders.get("text_encoder_3"),
        tokenizer=TokenShapes(lengths["text_encoder"]),
        tokenizer_2=TokenShapes(lengths["text_encoder_2"]),
        tokenizer_3=TokenShapes(lengths["text_encoder"]),
    )


def _cast(module: Any, dtype: torch.dtype) -> Any:
    return torch.nn.Module.to(module, dtype)  # diffusers' own ``to`` warns of half precision, which is wanted here


def _text_encoder(config: dict[str, Any]) -> Any:
    import transformers

    config = {
        k: v for k, v in config.items() if k not in ("architectures", "transformers_version", "dtype", "torch_dtype")
    }
    if config["model_type"] == "t5":
        return transformers.T5EncoderModel(transformers.T5Config(**config))
    return transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**config))


class TokenShapes:
    """Stands where a tokenizer does when only the shape of its output matters: token ids are all 0."""

    def __init__(self, length: int) -> None:
        self.model_max_length = length

    def __call__(self, text: list[str], padding: str, max_length: int | None = None, **_: Any) -> Any:
        length = 1 if padding == "longest" else max_length or self.model_max_length  # so that nothing is cut off
        return SimpleNamespace(input_ids=torch.zeros(len(text), length, dtype=torch.long))


def _configurations(path: str, architecture: Path | None) -> tuple[dict[str, dict[str, Any]], str]:
    """Configurations by component: the checkpoint's, else the recorded ones."""
    try:
        return _of_checkpoint(path), f"the configuration files of {path}"
    except (OSError, ValueError) as error:
        if architecture is None:
            raise unreadable(path, "model_index.json", "component configurations", error) from error
    try:
        components = json.loads(architecture.read_text(encoding="utf-8"))["components"]
        lacking = [name for name in FILES if name != "text_encoder_3" and not isinstance(components.get(name), dict)]
        if lacking:
            raise ValueError(f"no object under {', '.join(lacking)}")
        return components, f"the architecture recorded in {architecture.name}, because {path} cannot be read here"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"architecture: {architecture} cannot be read as component configurations ({type(error).__name__}: "
            f"{error}); "
            'it is a JSON object {"components": {"transformer": {...}, "vae": {...}, "scheduler": {...}, ...}}'
        ) from error


def _of_checkpoint(path: str) -> dict[str, dict[str, Any]]:
    """Raises ``OSError`` or ``ValueError`` where a configuration is not to be had."""
    index = _read(path, "model_index.json")
    absent = {name for name in FILES if index.get(name, [None])[0] is None}
    return {name: _read(path, file) for name, file in FILES.items() if name not in absent}


def _read(path: str, file: str) -> dict[str, Any]:
    return json.loads(file_of(path, file).read_text(encoding="utf-8"))
