"""Shared by the tests of midway and others."""

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from tests.support.tiny_diffusion import two_blocks

STEPS, BEGUN, SIZE, AT = 5, 6, 4, 2
SMALL = [
    *(f"model.path={two_blocks()}", f"sampling.steps={STEPS}", "model.dtype=float32", "algorithm.kl_coef=0"),
    *("train.prompts_per_step=2", f"train.group_size={SIZE}", "train.micro_batch_size=4", "train.max_cpu_seconds=null"),
    *("sampling.same_initial_noise=false", f"midway={{step: {AT}, group_size: {BEGUN}}}"),
]
AFTER, BEFORE = "sampling.window={size: 1, first: 3}", "sampling.window={size: 2, first: 1, last: 3}"


def run_of(*changes, recipe="shapes-lora"):
    loaded = load_recipe([recipe], [*SMALL, *changes])
    return build(loaded.recipe)
