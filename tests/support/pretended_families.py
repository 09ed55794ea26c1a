"""Shared by the tests of pretended families and others."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
EDITORS = (
    "flux2_klein_edit",
    "flux2_edit",
    "flux_kontext",
    "qwen_image_edit",
    "qwen_image_edit_plus",
    "wan_i2v",
    "wan22_i2v_5b",
    "wan_v2v",
    "hunyuan_video15_i2v",
    "ltx2_i2v",
)
OF_ONE = {
    "wan_v2v": {"steps": 5, "strength": 0.7},
    "ltx2_i2v": {"image_crf": 0},
}
SEEN = {"max_sequence_length": 512, "condition_size": 48}
PICTURES = [{"name": "jpeg:incompressibility"}]
KINDS = {
    "policy_gradient": {"algorithm": {"type": "flow_grpo", "kl_coef": 0.01}, "rewards": PICTURES},
    "forward_process": {"algorithm": {"type": "diffusion_nft", "noise_levels": 2}, "rewards": PICTURES},
    "pathwise": {
        "algorithm": {"type": "draft", "last_steps": 2},
        "rewards": [{"name": "colour:target", "options": {"rgb": [60, 95, 235]}}],
    },
    "offline": {"algorithm": {"type": "picture_dpo"}, "data": {"name": "shape_pairs"}, "rewards": []},
}


def settings(family, folder, kind, lora):
    size = 64 if family in ("flux2_klein_edit", "flux2_edit") else 32
    clips = family.startswith(("wan", "hunyuan", "ltx2"))
    short = 16 if family.startswith("wan") or family in ("flux", "flux_kontext") else 64
    own = {"sd3": 12, "wan_i2v": 512, "hunyuan_video15": 96, "hunyuan_video15_i2v": 96, "flux2": 288, "flux2_edit": 288}
    length = own.get(family, short)
    sampling = {"steps": 3, "height": size, "width": size, "max_sequence_length": length, "guidance_scale": 2.0}
    sampling |= {"frames": 5} if clips else SEEN if family.startswith("qwen_image_edit") else {}
    watched = {"name": f"clips.py:{'light' if kind == 'pathwise' else 'dark'}"}
    watched |= {"modality": "video"} if family.startswith("ltx2") and kind != "pathwise" else {}
    return {
        "name": "pretended",
        "device": "cuda",
        "pipeline": f"diffusion/{'wan' if family == 'wan22_ti2v' else family}",
        "model": {"path": str(folder), "dtype": "bfloat16", "lora": {"rank": 2, "alpha": 4} if lora else None},
        "data": {"name": "shape_edits" if family in EDITORS else "shapes"},
        "sampling": sampling | OF_ONE.get(family, {}),
        "train": {
            "steps": 2,
            "prompts_per_step": 2,
            "group_size": 1 if kind in ("pathwise", "offline") else 2,
            "micro_batch_size": 2,
        },
        "eval": {"every": 2, "samples": 2, "grid": 2},
        "checkpoint": {"every": 2},
        **KINDS[kind],
        **({"algorithm": {"type": "draft", "last_steps": 3}} if (family, kind) == ("wan22_a14b", "pathwise") else {}),
        **({"rewards": [watched]} if clips else {}),
    }
