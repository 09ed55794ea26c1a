"""Shared by the tests of saved lora and others."""

from importlib.util import find_spec

import torch
from PIL import Image

from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision

from mmrl.config.schema import Recipe  # noqa: E402

FAMILIES = [
    "sd",
    "sdxl",
    "sd3",
    "flux",
    "flux_kontext",
    "qwen_image",
    *(["qwen_image_edit", "qwen_image_edit_plus"] if find_spec("torchvision") else []),
    "wan",
    "wan_i2v",
    "z_image",
    "flux2_klein",
    "sana",
]
SEEN = {"max_sequence_length": 512, "condition_size": 48}
OWN = {
    "qwen_image_edit": SEEN,
    "qwen_image_edit_plus": SEEN,
    "wan": {"frames": 5},
    "wan_i2v": {"frames": 5, "max_sequence_length": 512},
}


def recipe(family, folder, lora):
    sampling = {
        "steps": 3,
        "height": 32,
        "width": 32,
        "max_sequence_length": {"sd3": 12, "flux": 16, "flux_kontext": 16}.get(family, 64),
    }
    return Recipe.model_validate(
        {
            "name": "test",
            "pipeline": f"diffusion/{family}",
            "model": {"path": str(folder), "lora": lora},
            "data": {"name": "shapes"},
            "sampling": sampling | OWN.get(family, {}),
            "rewards": [{"name": "shapes"}],
            "algorithm": {"type": "flow_grpo"},
            "train": {"steps": 1, "prompts_per_step": 2, "group_size": 4, "micro_batch_size": 8},
        }
    )


@torch.no_grad()
def velocity(adapter, model):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, *adapter.latent_shape(32, 32), generator=draw)
    picture = [Image.new("RGB", adapter.source_size[::-1], "red")] if adapter.edits else []
    made = adapter.encode_seen("a red circle", picture) if adapter.sees else adapter.encode("a red circle")
    made |= adapter.encode_source(picture) if picture else {}
    features = {k: torch.stack([v, v]) for k, v in made.items()}
    return adapter.predict(model, x, adapter.schedule(3).timesteps[:1].expand(2), features)


def model_of(pipe):
    return getattr(pipe, "unet", None) or pipe.transformer
