"""Shared by the tests of families and others."""

import pytest

from mmrl.config.schema import Recipe
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support.tiny_diffusion import SHAPES, save

allow_cpu_only()  # before transformers imports torchvision

FAMILIES = ["sd3", "sd", "sdxl", "flux", "qwen_image", "wan", "sana", "z_image", "flux2_klein", "flux2_klein_edit"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    made = {family: save(family, root / family) for family in FAMILIES if family not in ("sd3", "flux2_klein_edit")}
    return {"sd3": SHAPES, "flux2_klein_edit": made["flux2_klein"]} | made


def recipe(family, folders, lora=True, **sampling):
    length = {"sd3": 12, "flux": 16, "wan": 16}.get(family, 64)  # tokens of the tiny tokenizers are bytes, or pieces
    size = 64 if family == "flux2_klein_edit" else 32  # the least that the stock pipeline takes of a picture
    settings = {"steps": 3, "height": size, "width": size, "max_sequence_length": length, **sampling}
    settings = ({"frames": 5} if family == "wan" else {}) | settings
    return Recipe.model_validate(
        {
            "name": "test",
            "pipeline": f"diffusion/{family}",
            "model": {"path": str(folders[family]), "lora": {"rank": 4, "alpha": 8} if lora else None},
            "data": {"name": "shapes"},
            "sampling": settings,
            "rewards": [{"name": "shapes"}],
            "algorithm": {"type": "flow_grpo"},
            "train": {"steps": 1, "prompts_per_step": 2, "group_size": 4, "micro_batch_size": 8},
        }
    )
