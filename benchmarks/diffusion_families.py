"""Models of ``diffusion_step.py`` besides its Stable Diffusion 3: published architectures with smaller sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import mmrl

CLIP = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 64,
}
T5 = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
VAE = {"block_out_channels": [16, 32, 32, 32], "norm_num_groups": 8, "layers_per_block": 1}
SMALLER: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "flux": (
        "FluxAdapter",
        "flux-dev",
        {
            "transformer": {
                "attention_head_dim": 32,
                "axes_dims_rope": [8, 12, 12],
                "joint_attention_dim": 64,
                "num_attention_heads": 4,
                "num_layers": 2,
                "num_single_layers": 4,
                "pooled_projection_dim": 64,
            },
            "text_encoder": CLIP,
            "text_encoder_2": T5,
            "vae": VAE,
        },
    ),
    "sd": (
        "SDAdapter",
        "sd15",
        {
            "unet": {
                "attention_head_dim": 4,
                "block_out_channels": [32, 64, 64, 64],
                "cross_attention_dim": 64,
                "norm_num_groups": 8,
            },
            "text_encoder": CLIP,
            "vae": VAE,
        },
    ),
    "wan": (
        "WanAdapter",
        "wan21-1.3b",
        {
            "transformer": {
                "attention_head_dim": 32,
                "ffn_dim": 256,
                "freq_dim": 64,
                "num_attention_heads": 4,
                "num_layers": 4,
                "text_dim": 64,
            },
            "text_encoder": T5,
            "vae": {"base_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1},
        },
    ),
}
"""By family: its adapter, the recorded architecture, and the numbers that replace its own by component."""


def write(family: str, out: Path) -> None:
    """Write the small pipeline of ``family`` with random weights, as diffusers saves it."""
    name, recorded, smaller = SMALLER[family]
    recipes = Path(mmrl.__file__).parents[1] / "pipelines" / "diffusion" / "recipes"
    configs = json.loads((recipes / f"{recorded}.architecture.json").read_text())["components"]
    out.parent.mkdir(parents=True, exist_ok=True)
    architecture = out.with_name(f"{out.name}.architecture.json")
    architecture.write_text(json.dumps({"components": {k: c | smaller.get(k, {}) for k, c in configs.items()}}))
    adapter = getattr(mmrl.load("pipelines", f"diffusion/{family}"), name)
    describe = mmrl.load("pipelines", "diffusion/describe")
    pipe, _ = describe.empty_pipeline(adapter, str(out), architecture, {"default": torch.float32})
    torch.manual_seed(0)
    for component, module in pipe.components.items():
        if isinstance(module, torch.nn.Module):
            fill(module)
        elif component.startswith("tokenizer"):
            encoder = configs[component.replace("tokenizer", "text_encoder")]["architectures"][0]
            pipe.register_modules(**{component: tokenizer(encoder)})
    pipe.save_pretrained(out)


def fill(module: Any) -> None:
    """Random weights in the place of those on the meta device; buffers are made anew when the model is loaded."""
    module.to_empty(device="cpu")
    if hasattr(module, "tie_weights"):
        module.tie_weights()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)


def tokenizer(encoder: str) -> Any:
    """The shipped small model's, in the place of the family's: its ids are few."""
    import transformers

    shapes = Path(mmrl.__file__).parents[1] / "pipelines" / "diffusion" / "models" / "shapes-sd3"
    if encoder.startswith("CLIP"):
        return transformers.CLIPTokenizer.from_pretrained(shapes / "tokenizer", model_max_length=77)
    return transformers.T5Tokenizer.from_pretrained(shapes / "tokenizer_3")
