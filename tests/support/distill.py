"""Shared by the tests of distill and others."""

from __future__ import annotations

from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers is asked for a model
JUDGES = """
import pathlib
import mmrl

CALLS = []

@mmrl.reward(inputs=("text",))
def digits(samples, *, context):
    CALLS.extend(s.text for s in samples)
    return [sum(c.isdigit() for c in s.text) / max(1, len(s.text)) for s in samples]

@mmrl.reward(inputs=("text",))
def same(samples, *, context):
    return [0.25 for s in samples]

@mmrl.reward(inputs=("text",))
def none(samples, *, context):
    return [None for s in samples]

@mmrl.reward(inputs=("text",))
def large(samples, *, context):
    return [3.0 + len(s.text) for s in samples]

@mmrl.reward(inputs=("text",))
def odd(samples, *, context):
    return [(hash_of(s.text) % 97) / 97 for s in samples]

def hash_of(text):
    import zlib
    return zlib.crc32(("salt" + text).encode())

@mmrl.reward(inputs=("text",), per="group")
def longest(samples, *, context):
    order = sorted(len(s.text) for s in samples)
    return [order.index(len(s.text)) / len(order) for s in samples]
"""
RECIPE = """
name: tiny
pipeline: llm/chat
model: {path: tinylm, lora: {rank: 4, alpha: 12}}
data: {name: sums, train: {count: 60, operations: 1}, heldout: {count: 8, operations: 1}}
sampling: {max_new_tokens: 8}
rewards: [{name: "judges.py:digits"}]
algorithm: {type: grpo}
train: {steps: 2, prompts_per_step: 8, group_size: 4, micro_batch_size: 32}
optim: {lr: 0.02}
eval: {every: null, samples: 8}
checkpoint: {every: 1}
"""
