"""Models with the shapes that a recipe records in its architecture file and random weights: no checkpoint is needed.

Everything but the reading of weights is the product's: ``built`` is ``mmrl.app.build.build`` of the recipe, as ``mmrl
train`` calls it. Text encoders have one layer, since what is timed begins behind them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from smoke_place import Place
from torch import nn

import mmrl
from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.step.step_context import StepContext

PIPELINES = Path(__file__).resolve().parents[1] / "pipelines"
SHAPES = PIPELINES / "diffusion" / "models" / "shapes-sd3"
SUMS = PIPELINES / "llm" / "models" / "sums-qwen3"
ONE_LAYER = {"num_hidden_layers": 1, "num_layers": 1, "depth": 1, "fullatt_block_indexes": [0]}
_CLIP = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "projection_dim": 16}
SMALL: dict[str, dict[str, dict[str, Any]]] = {
    "sd35-medium": {
        "transformer": {
            "num_layers": 2,
            "num_attention_heads": 2,
            "caption_projection_dim": 128,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "dual_attention_layers": [0],
            "pos_embed_max_size": 16,
        },
        "text_encoder": _CLIP,
        "text_encoder_2": _CLIP,
        "text_encoder_3": {"d_model": 32, "d_ff": 32, "d_kv": 8, "num_heads": 4},
        "vae": {"block_out_channels": [8, 8, 8, 8], "norm_num_groups": 4, "layers_per_block": 1},
    },
    "qwen-image": {
        "transformer": {"num_layers": 2, "num_attention_heads": 2, "joint_attention_dim": 32},
        "text_encoder": {
            "text_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
                "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
            },
            "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
        },
        "vae": {"base_dim": 8},
    },
    "z-image": {
        "transformer": {
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 32,
            "axes_dims": [4, 6, 6],
            "axes_lens": [128, 16, 16],
        },
        "text_encoder": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        "vae": {"block_out_channels": [8, 8, 8, 8], "norm_num_groups": 4, "layers_per_block": 1},
    },
}
"""What a CPU computes in seconds, in place of the recorded sizes."""


def built(place: Place, recipe: str, *words: str, layer: Path | None = None) -> StepContext:
    """The run of a recipe of pictures, with a ``layer`` over it, as ``mmrl train`` builds it, over random weights."""
    files = [recipe, *([] if layer is None else [layer])]
    loaded = load_recipe(files, [f"device={place.device}", "train.steps=9", *words])
    with random_weights(place, recipe):
        return build(loaded.recipe)


@contextlib.contextmanager
def random_weights(place: Place, recipe: str) -> Iterator[None]:
    """Inside the block, pipelines of pictures are not read from files: they have the recorded shapes of ``recipe``."""
    loading = mmrl.load("pipelines", "diffusion/sd3").loading
    read = loading._load

    def made(family: Any, settings: Any, path: str) -> Any:
        file = place.folder / "architecture.json"
        file.write_text(json.dumps({"components": components(place, recipe)}))
        pipe, _ = mmrl.load("pipelines", "diffusion/describe").empty_pipeline(
            family, "no/model", file, loading._dtypes(family, settings)
        )
        for name, part in pipe.components.items():
            if isinstance(part, nn.Module):
                filled(part, place.device if name == family.trains else "cpu")
            elif name.startswith("tokenizer"):
                pipe.register_modules(**{name: tokenizer(pipe.components[name.replace("tokenizer", "text_encoder")])})
        return pipe

    loading._load = made
    try:
        yield
    finally:
        loading._load = read


def components(place: Place, recipe: str) -> dict[str, Any]:
    """The configurations of a recipe's components, with text encoders of one layer."""
    file = PIPELINES / "diffusion" / "recipes" / f"{recipe}.architecture.json"
    found: dict[str, Any] = json.loads(file.read_text())["components"]
    for name, config in found.items():
        if name.startswith("text_encoder"):
            replaced(config, ONE_LAYER)
        if place.small:
            replaced(config, SMALL[recipe].get(name, {}), add=True)
    return found


def replaced(config: dict[str, Any], values: Mapping[str, Any], *, add: bool = False) -> None:
    """Put ``values`` in the place of what ``config`` has, and of what its parts have; ``add``: also what it lacks."""
    for part in config.values():
        if isinstance(part, dict) and not add:
            replaced(part, values)
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(config.get(name), dict) and name.endswith("_config"):
            replaced(config[name], value, add=True)
        elif name in config or add:
            config[name] = value


@torch.no_grad()
def filled(module: nn.Module, device: str) -> None:
    """Random weights on ``device`` in the place of those on the meta device."""
    nn.Module.to_empty(module, device=torch.device(device))
    if hasattr(module, "tie_weights"):
        module.tie_weights()  # type: ignore[operator]  # T5's two names for its embedding
    if type(rope := getattr(module, "pos_embed", None)).__name__ == "QwenEmbedRope":  # its tensors are no buffers
        module.pos_embed = type(rope)(rope.theta, rope.axes_dim, rope.scale_rope)  # type: ignore[union-attr]
    torch.manual_seed(0)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not tensor.is_floating_point():
            tensor.copy_(torch.arange(tensor.numel(), device=device).view(tensor.shape))  # places of tokens
        elif tensor.ndim > 1:
            tensor.normal_(std=0.02)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)


def tokenizer(encoder: nn.Module) -> Any:
    """A shipped tokenizer of the kind that reads for ``encoder``."""
    import transformers as t

    kind = type(encoder).__name__
    if kind.startswith("CLIP"):
        return t.CLIPTokenizer.from_pretrained(SHAPES / "tokenizer", model_max_length=77)
    if "T5" in kind:
        return t.T5Tokenizer.from_pretrained(SHAPES / "tokenizer_3", model_max_length=512)
    return t.AutoTokenizer.from_pretrained(SUMS)


def decoder(
    place: Place, recorded: str = "qwen25-0.5b", *, layers: int | None = None, changes: Mapping[str, int] | None = None
) -> Path:
    """A folder with a random decoder of the recorded width and a shipped tokenizer; ``layers`` and ``changes`` of its
    configuration: instead of its own."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    (file,) = PIPELINES.glob(f"*/recipes/{recorded}.architecture.json")
    tokens = AutoTokenizer.from_pretrained(SUMS)
    given: dict[str, Any] = json.loads(file.read_text())["files"]["config.json"]
    known = {*Qwen2Config().to_dict()} - {"architectures", "model_type"}
    kept = {name: value for name, value in given.items() if name in known and not name.startswith("rope_")}
    kept |= changes or {}
    if layers is not None:
        kept["num_hidden_layers"] = layers
    if place.small:
        kept |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512}
        kept |= {"num_hidden_layers": 2, "num_key_value_heads": 2}
    kept |= {"use_sliding_window": False, "eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    kept["bos_token_id"] = None
    folder = place.folder / recorded
    with torch.device(place.device):
        model: Any = Qwen2ForCausalLM(Qwen2Config(**kept))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


BY_PLAN = ["model.gradient_checkpointing=false", "train.micro_batch_size=1280", "train.micro_batch_tokens=16896"]
BY_PLAN += ["sampling.batch_size=640"]
"""What ``mmrl plan qwen25-0.5b-gsm8k --gpu h100-80g`` chooses, but for compiled steps."""


def run_of_text(place: Place, folder: Path, *words: str) -> StepContext:
    """The run of the recipe for word problems, as ``mmrl train`` builds it, on the model in ``folder``."""
    given = [f"device={place.device}", f"model.path={folder}", "train.steps=9", *BY_PLAN, *words]
    loaded = load_recipe(["qwen25-0.5b-gsm8k"], given)
    return build(loaded.recipe)
