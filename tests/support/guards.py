"""Shared by the tests of guards and others."""

WATCHED = "eval.rewards=[{name: 'colour:target', label: halfway, options: {rgb: [150, 150, 170]}}]"
SMALL = [
    *("sampling.steps=4", "train.prompts_per_step=2", "train.micro_batch_size=4", "optim.lr=1e-2", "train.steps=2"),
    *("eval.every=1", "eval.samples=4", "eval.grid=1", "checkpoint.every=1"),
    WATCHED,
]
