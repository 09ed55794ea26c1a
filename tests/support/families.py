"""Shared by the tests of families and others."""

from pathlib import Path

import pytest

from mmrl.config.schema import Recipe
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support.tiny_diffusion import SHAPES, save

allow_cpu_only()  # before transformers imports torchvision

FAMILIES = [
    "sd3",
    "sd",
    "sdxl",
    "flux",
    "flux_kontext",
    "qwen_image",
    "qwen_image_edit",
    "qwen_image_edit_plus",
    "wan",
    "wan_i2v",
    "wan_v2v",
    "hunyuan_video15",
    "hunyuan_video15_i2v",
    "ltx2",
    "ltx2_i2v",
    "ltx2_v2v",
    "sana",
    "z_image",
    "flux2_klein",
    "flux2_klein_edit",
    "flux2",
    "flux2_edit",
]
EDITORS = (
    "flux_kontext",
    "flux2_klein_edit",
    "flux2_edit",
    "qwen_image_edit",
    "qwen_image_edit_plus",
    "wan_i2v",
    "wan_v2v",
    "hunyuan_video15_i2v",
    "ltx2_i2v",
    "ltx2_v2v",
)
CLIPS = ("wan", "wan_i2v", "wan_v2v", "hunyuan_video15", "hunyuan_video15_i2v", "ltx2", "ltx2_i2v", "ltx2_v2v")
OF = {"wan22_ti2v": "wan"}
"""Other models of a family."""
SAME = {
    "flux2_klein_edit": "flux2_klein",
    "flux2_edit": "flux2",
    "wan22_i2v_5b": "wan22_ti2v",
    "wan_v2v": "wan",
    "ltx2_i2v": "ltx2",
    "ltx2_v2v": "ltx2",
}
"""Families that share a checkpoint."""
TOLD = ("flux", "flux_kontext", "flux2", "flux2_edit")
"""Whose guidance is an input of the model, so that there is one prediction and no negative prompt."""

OF_ONE = {
    "wan_v2v": {"strength": 0.7},
    "ltx2_i2v": {"image_crf": 0},  # PyAV is no part of what every test has
    "ltx2_v2v": {"frames": 13, "held_frames": 9},
}
SEEN = {"max_sequence_length": 512, "condition_size": 48}
"""Of a family whose text encoder sees the picture: its template alone has 350 tiny tokens, and the picture has another
size than the one that is made."""

_LAST = [f"transformer_blocks.1.{part}" for part in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp")]
_LAST_HUNYUAN = [f"transformer_blocks.1.{part}" for part in ("attn.add_q_proj", "attn.to_add_out", "ff_context")]
UNREAD: dict[str, list[str]] = {
    "sd3": ["transformer_blocks.3.attn.add_q_proj"],
    "qwen_image": _LAST,
    "qwen_image_edit": _LAST,
    "qwen_image_edit_plus": _LAST,
    "hunyuan_video15": _LAST_HUNYUAN,
    "hunyuan_video15_i2v": _LAST_HUNYUAN,
}
"""Weights that nothing reads: the last block drops its text stream."""


class _Folders(dict[str, Path]):
    """Where the tiny model of a family is, which is made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__(sd3=SHAPES)
        self.root = root

    def __missing__(self, family: str) -> Path:
        of = SAME.get(family, family)
        self[family] = save(family, self.root / family) if of == family else self[of]
        return self[family]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return _Folders(tmp_path_factory.mktemp("families"))


def recipe(family, folders, lora=True, **sampling):
    wan = family.startswith("wan")
    short = 16 if wan or family in TOLD else 64
    own_length = {"sd3": 12, "wan_i2v": 512, "flux2": 288, "flux2_edit": 288}
    length = 96 if family.startswith("hunyuan") else own_length.get(family, short)  # tiny tokens: bytes, or pieces
    size = (
        64 if family in ("flux2_klein_edit", "flux2_edit") else 32
    )  # the least that the stock pipeline takes of a picture
    own = {"frames": 5} if wan or family in CLIPS else SEEN if family.startswith("qwen_image_edit") else {}
    own = own | ({"pictures": 2} if family in ("qwen_image_edit_plus", "flux2_edit") else {})
    own = own | OF_ONE.get(family, {})
    settings = {"steps": 3, "height": size, "width": size, "max_sequence_length": length, **own, **sampling}
    return Recipe.model_validate(
        {
            "name": "test",
            "pipeline": f"diffusion/{OF.get(family, family)}",
            "model": {"path": str(folders[family]), "lora": {"rank": 4, "alpha": 8} if lora else None},
            "data": {"name": "shapes"},
            "sampling": settings,
            "rewards": [{"name": "shapes"}],
            "algorithm": {"type": "flow_grpo"},
            "train": {"steps": 1, "prompts_per_step": 2, "group_size": 4, "micro_batch_size": 8},
        }
    )
