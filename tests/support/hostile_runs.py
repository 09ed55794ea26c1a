"""Shared by the tests of hostile runs and others."""

RECIPE = [
    "shapes-lora",
    "train.prompts_per_step=2",
    "train.group_size=2",
    "train.micro_batch_size=4",
    "sampling.steps=3",
    "sampling.window={size: 2}",
    "eval.samples=2",
    "eval.grid=2",
    "eval.every=1",
    "checkpoint.every=1",
    "optim.schedule=constant",
    "eval.early_stopping={metric: reward/shapes, patience: 5}",
]
