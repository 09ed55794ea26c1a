"""A judge in the loop: text and diffusion are trained on its verdicts, which a resumed run finds in the cache."""

import json

import pytest
import torch

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.lines import rows_of
from mmrl.rewards.judging.store import CACHE, TRANSCRIPTS
from mmrl.training.loop import train_step
from tests.support import judging, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loop")
    judging.text_model(folder / "policy")
    judging.text_model(folder / "critic", positions=1024)
    (folder / "rubric.txt").write_text("{{ prompt }}\n{{ response }}\nGood?")
    rows = [{"id": str(i), "prompt": f"Say {i} letters."} for i in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "recipe.yaml").write_text(
        """
name: tiny
pipeline: llm/chat
model: {path: policy}
data: {name: jsonl, train: {path: data.jsonl, heldout: 8}, heldout: {path: data.jsonl, heldout: 8}}
sampling: {max_new_tokens: 8}
rewards: [{name: judge, options: {model: critic, rubric: rubric.txt, answer: {type: yes_no, floor: 0}}}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 4, prompts_per_step: 2, group_size: 4, micro_batch_size: 2}
optim: {lr: 1.0e-3}
"""
    )
    return folder


def run_of(folder, out, *overrides):
    loaded = load_recipe([folder / "recipe.yaml"], [*overrides])
    run = build(loaded.recipe)
    run.rewards.folder = out
    return run


def step(run, number):
    return train_step(run, number, Clock(torch.device("cpu")))


def asked(run):
    """The questions that reach the judge's model from now on."""
    judge = run.rewards._entries[0].loaded.call.__self__
    found, ask = [], judge.local.ask
    judge.local.ask = lambda asks, *rest: found.extend(asks) or ask(asks, *rest)
    return found


def test_a_policy_is_trained_on_a_judges_verdicts_and_a_second_run_finds_them_again(folder, tmp_path):
    run = run_of(folder, tmp_path)
    before = {k: p.detach().clone() for k, p in run.policy.trainable.items()}
    (first, failures), (second, _) = step(run, 0), step(run, 1)
    run.rewards.close()
    assert not failures
    assert 0 < first["reward/judge"] < 1
    assert first["reward/std"] > 0
    assert any(not torch.equal(before[k], p) for k, p in run.policy.trainable.items())
    rows = list(rows_of(tmp_path / TRANSCRIPTS))
    assert [row["step"] for row in rows] == [0] * 8 + [1] * 8
    assert {row["judge"] for row in rows} == {"judge"}
    assert rows[0]["request"].startswith("Say ")

    again = run_of(folder, tmp_path)  # as after a kill: the same steps, from the same weights
    questions = asked(again)
    (resumed, _), (next_, _) = step(again, 0), step(again, 1)
    again.rewards.close()
    assert not questions
    plain = [
        {k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "plan/", "features/"))}
        for row in (first, second)
    ]
    assert [{k: row[k] for k in p} for row, p in zip((resumed, next_), plain, strict=True)] == plain
    assert len(list(rows_of(tmp_path / CACHE))) == len({row["request"] for row in rows})


def test_pictures_of_a_diffusion_policy_are_judged(folder, tmp_path):
    pytest.importorskip("torchvision")
    tiny.vision_model(tmp_path / "seeing", "qwen2_5_vl")
    judge = {"model": str(tmp_path / "seeing"), "rubric": "{{ image }}Does it show {{ prompt }}?"}
    judge["answer"] = {"type": "yes_no", "floor": 0}
    small = ["train.prompts_per_step=1", "train.group_size=4", "train.micro_batch_size=2", "sampling.steps=3"]
    loaded = load_recipe(["shapes-lora"], [*small, f"rewards=[{{name: judge, options: {json.dumps(judge)}}}]"])
    run = build(loaded.recipe)
    run.rewards.folder = tmp_path
    row, failures = step(run, 0)
    run.rewards.close()
    assert not failures
    assert 0 < row["reward/judge"] < 1
    rows = list(rows_of(tmp_path / TRANSCRIPTS))
    assert len(rows) == 4
    assert sum(bool(r.get("pictures")) for r in rows) == 4  # the lowest and the highest of each micro-batch
