"""Shared by the tests of sweep and others."""

from __future__ import annotations

REWARDS = """
import os, pathlib, signal
import mmrl

@mmrl.reward(inputs=("text",))
def short(samples, *, context):
    stop = pathlib.Path(__file__).with_name("stop")
    if stop.exists():  # as Ctrl-C does
        stop.unlink()
        os.kill(os.getpid(), signal.SIGINT)
    return [-len(s.text) / 50 for s in samples]
"""
RECIPE = """
name: tiny
pipeline: llm/chat
model: {path: tinylm, lora: {rank: 4, alpha: 12}}
data: {name: sums, train: {count: 20, operations: 1}, heldout: {count: 8, operations: 1}}
sampling: {max_new_tokens: 6}
rewards: [{name: "two.py:short"}]
algorithm: {type: grpo}
train: {steps: 4, prompts_per_step: 2, group_size: 4, micro_batch_size: 8}
optim: {lr: 0.02}
eval: {every: 4, samples: 8}
checkpoint: {every: 1}
"""
