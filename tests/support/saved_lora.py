"""Shared by the tests of saved lora and others."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision

from mmrl.config.schema import Recipe  # noqa: E402
from tests.support.tiny_diffusion import SHAPES, save  # noqa: E402

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
    "flux2_klein_edit",
    "flux2",
    "flux2_edit",
    "wan_v2v",
    "wan22_ti2v",
    "wan22_i2v_5b",
    "ltx2",
    "ltx2_i2v",
    "ltx2_v2v",
]
SEEN = {"max_sequence_length": 512, "condition_size": 48}
OWN = {
    "qwen_image_edit": SEEN,
    "qwen_image_edit_plus": SEEN,
    "wan": {"frames": 5},
    "wan_i2v": {"frames": 5, "max_sequence_length": 512},
    "wan_v2v": {"frames": 5, "strength": 0.7},
    "wan22_ti2v": {"frames": 5},
    "hunyuan_video15": {"frames": 5, "max_sequence_length": 96},
    "wan22_i2v_5b": {"frames": 5},
    "flux2": {"max_sequence_length": 288},
    "flux2_edit": {"max_sequence_length": 288},
    "ltx2": {"frames": 5},
    "ltx2_i2v": {"frames": 5, "image_crf": 0},
    "ltx2_v2v": {"frames": 9, "held_frames": 5},
}
OF = {"wan22_ti2v": "wan"}
"""Other models of a family."""
SAME = {
    "flux2_klein_edit": "flux2_klein",
    "flux2_edit": "flux2",
    "wan_v2v": "wan",
    "wan22_i2v_5b": "wan22_ti2v",
    "ltx2_i2v": "ltx2",
    "ltx2_v2v": "ltx2",
}
"""Families that share a checkpoint."""


class Lazy(dict[str, Any]):
    """What ``make`` makes of a family, when it is first asked for; once for those that share a checkpoint."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, family: str) -> Any:
        of = SAME.get(family, family)
        self[family] = self._make(family) if of == family else self[of]
        return self[family]


def folders_in(root: Path) -> Lazy:
    """Where the tiny model of a family is."""
    return Lazy(lambda family: SHAPES if family == "sd3" else save(family, root / family))


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
            "pipeline": f"diffusion/{OF.get(family, family)}",
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
    count = (adapter.sampling.held_frames or adapter.sampling.frames) if adapter.clips else 1
    picture = [Image.new("RGB", adapter.source_size[::-1], "red")] * count if adapter.edits else []
    made = adapter.encode_seen("a red circle", picture) if adapter.sees else adapter.encode("a red circle")
    made |= adapter.encode_source(picture) if picture else {}
    features = {k: torch.stack([v, v]) for k, v in made.items()}
    return adapter.predict(model, x, adapter.schedule(3).timesteps[:1].expand(2), features)


def model_of(pipe):
    return getattr(pipe, "unet", None) or pipe.transformer
