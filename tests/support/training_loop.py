"""Shared by the tests of training loop and others."""

import torch

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.training import loop
from tests.support.tiny_diffusion import two_blocks

SMALL = [
    "train.prompts_per_step=2",
    "train.group_size=4",
    "train.micro_batch_size=4",
    "sampling.steps=4",
    "sampling.window={size: 2}",
]


def make(*overrides):
    """A run of the shipped recipe, on two blocks of its model."""
    loaded = load_recipe(["shapes-lora"], [f"model.path={two_blocks()}", *SMALL, *overrides])
    return build(loaded.recipe)


def step(run, n=0):
    return loop.train_step(run, n, Clock(torch.device("cpu")))


def update_gradient(run):
    """The gradient of the first update of step 0, before the optimizer."""
    kept = {}
    apply = run.policy.apply

    def keep():
        kept.update({k: p.grad.clone() for k, p in run.policy.trainable.items() if p.grad is not None})
        return apply()

    run.policy.apply = keep
    row, _ = step(run)
    return torch.cat([g.flatten() for g in kept.values()]), row


FORWARD = ["sampling.window=null", "sampling.same_initial_noise=false"]
