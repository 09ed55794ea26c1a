"""Shared by the tests of plan text and others."""

import gc

import torch

from mmrl.app.build import build
from mmrl.core.clock import Clock
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.fake_tensors import LiveBytes, nbytes
from mmrl.planner.plan import plan
from mmrl.training.loop import train_step

allow_cpu_only()
RECIPE = """
name: tiny
device: cpu
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 8}, heldout: {path: data.jsonl, heldout: 8}}
sampling: {max_new_tokens: 12, batch_size: 24}
rewards: [{name: reward.py}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 4, prompts_per_step: 6, group_size: 4, micro_batch_size: 8}
"""
REWARD = """
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [float(len(s.text) % 3) for s in samples]
"""


def real(loaded, steps=2):
    """Bytes of the weights and copies, and the highest bytes of everything else while ``steps`` real steps run."""
    run = build(loaded.recipe)
    modules = [run.policy.module, *([run.critic.module] if run.critic else [])]
    held = nbytes(t for m in modules for t in [*m.parameters(), *m.buffers()])
    held += nbytes(t for copy in run.policy.copies.values() for t in copy.values())
    gc.collect()
    with LiveBytes() as live:
        for step in range(steps):
            train_step(run, step, Clock(torch.device("cpu")))
    return {"held": held, "peak": live.peak, "features": run.pipeline.features.bytes}


def ratio_of(loaded):
    made = plan(loaded)
    assert made.problems == []
    assert not [note for note in made.notes if "bfloat16" not in note]  # what does not depend on this CPU
    found = real(loaded)
    said = made.peak.total - made.peak.parts["prompt features"] + found["features"]
    is_so = found["held"] + found["peak"]
    print(f"{loaded.overrides}: said {said:,} in {made.peak.name}, real {is_so:,}: {said / is_so:.3f}")
    return said / is_so
