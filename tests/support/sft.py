"""Shared by the tests of sft and others."""

import json
import random

import torch

from mmrl.core.clock import Clock
from mmrl.training import loop

DATA = "{path: answers.jsonl, heldout: 16}"
RECIPE = f"""
name: tiny-sft
pipeline: llm/chat
model: {{path: model}}
data: {{name: jsonl, train: {DATA}, heldout: {DATA}}}
sampling: {{max_new_tokens: 8}}
algorithm: {{type: sft}}
train: {{steps: 20, prompts_per_step: 16, group_size: 1, micro_batch_size: 16}}
optim: {{lr: 3.0e-3, weight_decay: 0.0, max_grad_norm: 1.0e+9}} # gradients are compared
eval: {{every: 20, samples: 16}}
"""
SLICES = [["train.micro_batch_size=3"], ["train.micro_batch_tokens=500"]]


def answers(n, seed=0):
    """The answer is an even number, of one digit or several."""
    rng = random.Random(seed)
    for i in range(n):
        yield {"prompt": f"Say a number, not {i}", "completion": f"{'7' * rng.randint(0, 6)}{rng.choice('02468')}"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def gradient_of(run):
    """Of one update, before the optimizer moves, and the step's metrics."""
    kept = {}
    run.policy.optimizer.register_step_pre_hook(
        lambda *_: kept.update({n: p.grad.clone() for n, p in run.policy.trainable.items() if p.grad is not None})
    )
    row, _ = loop.train_step(run, 0, Clock(torch.device("cpu")))
    return kept, row


def flat(gradient):
    return torch.cat([g.flatten() for _, g in sorted(gradient.items())])


def lines(run, name="heldout.jsonl"):
    clocks = ("time/", "perf/", "plan/", "features/")
    rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(clocks)} for row in rows]
