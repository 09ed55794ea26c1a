"""Shared by the tests of picture dpo and others."""

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from tests.support.tiny_diffusion import two_blocks

SMALL = ["train.prompts_per_step=4", "train.micro_batch_size=4", "sampling.steps=4", "eval.samples=4", "eval.grid=2"]


def make(*overrides):
    loaded = load_recipe(["shapes-dpo"], [f"model.path={two_blocks()}", *SMALL, *overrides])
    return build(loaded.recipe)
