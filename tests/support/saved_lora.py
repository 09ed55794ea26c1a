"""Shared by the tests of saved lora and others."""

import torch

from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision

from mmrl.config.schema import Recipe  # noqa: E402

FAMILIES = ["sd", "sdxl", "sd3", "flux", "flux_kontext", "qwen_image", "wan", "z_image", "flux2_klein", "sana"]


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
            "sampling": sampling | ({"frames": 5} if family == "wan" else {}),
            "rewards": [{"name": "shapes"}],
            "algorithm": {"type": "flow_grpo"},
            "train": {"steps": 1, "prompts_per_step": 2, "group_size": 4, "micro_batch_size": 8},
        }
    )


@torch.no_grad()
def velocity(adapter, model):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, *adapter.latent_shape(32, 32), generator=draw)
    features = {k: torch.stack([v, v]) for k, v in adapter.encode("a red circle").items()}
    return adapter.predict(model, x, adapter.schedule(3).timesteps[:1].expand(2), features)


def model_of(pipe):
    return getattr(pipe, "unet", None) or pipe.transformer
