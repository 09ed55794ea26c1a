"""Shared by the tests of pretended text and others."""

import json
from collections import Counter

import pytest

RECIPE = """
name: text
device: cuda
pipeline: llm/chat
model: {path: model, dtype: bfloat16}
data: {name: jsonl, train: {path: data.jsonl, heldout: 8}, heldout: {path: data.jsonl, heldout: 8}}
sampling: {max_new_tokens: 6, top_k: 50, top_p: 0.95}
rewards: [{name: reward.py}]
algorithm: {type: grpo}
train: {steps: 2, prompts_per_step: 2, group_size: 4, micro_batch_size: 4}
eval: {every: 2, samples: 4}
checkpoint: {every: 2}
"""
REWARD = """
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [float(len(set(s.text))) for s in samples]
"""
PAIRS = ["data={name: sum_pairs}", "rewards=[]", "train.group_size=1", "sampling.max_new_tokens=12"]
CASES = {
    "grpo": ["algorithm={type: grpo, kl_coef: 0.1}", "train.updates_per_step=2"],
    "dapo": ["algorithm={type: dapo, max_attempts: 2}", "train.micro_batch_tokens=200"],
    "ppo": ["algorithm={type: ppo, kl_coef: 0.1}"],
    "dpo": ["algorithm={type: dpo}", *PAIRS],
    "reward_model": ["algorithm={type: reward_model}", "pipeline=llm/score", *PAIRS, "sampling={max_new_tokens: 12}"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.support import tiny

    folder = tmp_path_factory.mktemp("text")
    tiny.language_model(folder / "model", sharp=0.02)
    rows = [{"id": str(i), "prompt": f"Say {'very ' * (i % 4)}{i} letters."} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def trained(recipe, out, *overrides):
    """The rows of two steps with an evaluation and a checkpoint, and of a third after that."""
    from mmrl.app.trainer import Trainer
    from mmrl.config.loader import load_recipe
    from mmrl.core.signals import Stop
    from mmrl.logging.rundir import RunDir

    for steps in (2, 3):
        loaded = load_recipe([recipe], [*overrides, f"train.steps={steps}"])
        with RunDir(out) if steps == 3 else RunDir.create(out) as directory:
            outcome = Trainer(loaded, directory).begin(Stop(), resume=steps == 3)
            assert not outcome.error, outcome.error
    assert len((out / "heldout.jsonl").read_text().splitlines()) >= 2
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


class Pretended:
    """The first of eight controllers; the others have what it has."""

    def __init__(self, group):
        self.sent, self.waited, self.ranks = Counter(), 0.0, group

    def sum(self, values, kind):
        return values

    def gather(self, values):
        return [values] * 8

    def again(self, backend):
        return self.ranks


@pytest.fixture
def world():
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()
