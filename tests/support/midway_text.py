"""Runs whose text is scored in the middle of responses, for the tests of it."""

import json

import torch

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.trajectory import SampleId, Slot
from mmrl.rollout.rounds import sample_and_score
from tests.support import tiny

LONGEST, AT, BEGUN, SIZE = 14, 4, 6, 3

REWARD = '''
import mmrl
from mmrl.core.reward_contract import Spans

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    """The share of letters that are vowels, and a little of the length."""
    return [sum(c in "aeiou" for c in s.text) / max(1, len(s.text)) + 0.01 * len(s.text) for s in samples]

@mmrl.reward(inputs=("text",), spans=True)
def pieces(samples, *, context):
    """Nothing for the whole, and for two pieces what ``score`` gives it."""
    values = score(samples, context=context)
    parts = [Spans([(0, 1 if s.text else 0, 5.0), (0, len(s.text), v - 5.0)]) for s, v in zip(samples, values)]
    return {"score": [0.0] * len(samples), "spans": parts}
'''


def write(made):
    """A recipe with its tiny model in the folder ``made``, which it returns. The model has many ways to stop, so that
    responses have lengths of all kinds."""
    tiny.language_model(made / "model", sharp=0.1)
    settings = json.loads((made / "model" / "generation_config.json").read_text())
    settings["eos_token_id"] = list(range(0, 256, 9))
    (made / "model" / "generation_config.json").write_text(json.dumps(settings))
    (made / "reward.py").write_text(REWARD)
    prompts = [{"id": str(i), "prompt": f"Say {i} {'long ' * (i % 3)}letters."} for i in range(40)]
    prompts[1]["max_new_tokens"], prompts[2]["max_new_tokens"] = 6, 3
    (made / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (made / "recipe.yaml").write_text(
        f"""
name: midway-text
pipeline: llm/chat
model: {{path: model}}
data: {{name: jsonl, train: {{path: data.jsonl, heldout: 8}}, heldout: {{path: data.jsonl, heldout: 8}}}}
sampling: {{max_new_tokens: {LONGEST}}}
rewards: [{{name: reward.py, label: vowels}}]
midway: {{tokens: {AT}, group_size: {BEGUN}}}
algorithm: {{type: grpo, kl_coef: 0.0}}
train: {{steps: 2, prompts_per_step: 2, group_size: {SIZE}, micro_batch_size: 4}}
optim: {{lr: 1.0e-2}}
eval: {{every: null, samples: 4, temperature: 0.0}}
checkpoint: {{every: 1}}
"""
    )
    return made


def make(folder, *changes):
    loaded = load_recipe([folder / "recipe.yaml"], [*changes])
    return build(loaded.recipe)


def asked(run, size=BEGUN, slots=None):
    slots = slots or [Slot(0, n, 0, run.prompts[n]) for n in range(3)]
    run.pipeline.encode(slots)
    return [s for s in slots for _ in range(size)], [SampleId(0, s.index, 0, k) for s in slots for k in range(size)]


def rounds(run, slots=None):
    slots = slots or [Slot(0, n, 0, run.prompts[n]) for n in range(2)]
    with run.compute.devices.sampling_phase(run, "current"):
        return sample_and_score(run, slots, 0, Clock(torch.device("cpu")))


def responses(trajectory):
    return [row[:n] for row, n in zip(trajectory.padded("tokens").tolist(), trajectory.responses, strict=True)]
