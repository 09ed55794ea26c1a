"""Shared by the tests of divergence and others."""

PICTURES = [
    *("train.prompts_per_step=1", "train.group_size=4", "train.micro_batch_size=4", "train.steps=6"),
    *("sampling.steps=3", "sampling.window={size: 2}", "eval.every=null", "checkpoint.every=1"),
    *("optim.schedule=constant", "optim.max_grad_norm=1e30"),
]
