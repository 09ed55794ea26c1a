"""Text in the one loop, on tiny real models: every algorithm, packing, dynamic sampling, resumption, learning."""

import json
import os
from dataclasses import replace
from functools import cache

import pytest
import torch

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.core.clock import Clock
from mmrl.core.trajectory import Prompt, Slot
from mmrl.logging.metrics import describe
from mmrl.logging.rundir import RunDir
from mmrl.rollout.collect import collect_batch
from mmrl.runtime.start import train
from mmrl.step.micro_batches import split_micro_batches
from mmrl.step.step_metrics import StepMetrics
from mmrl.training.loop import train_step
from tests.support import tiny

REWARD = '''
import mmrl
from mmrl.core.reward_contract import Spans

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    """The share of letters that are vowels."""
    return [sum(c in "aeiou" for c in s.text) / max(1, len(s.text)) for s in samples]

@mmrl.reward(inputs=("text",))
def rare(samples, *, context):
    """1 for the samples of prompts that hold a 7."""
    return [float("7" in s.prompt.text and s.id.sample == 0) for s in samples]

@mmrl.reward(inputs=("text",), spans=True)
def steps(samples, *, context):
    """Each response but the first of a group has its first half wrong."""
    return {
        "score": [float(s.id.sample % 2) for s in samples],
        "spans": [Spans([(0, len(s.text) // 2, -1.0)] if s.id.sample else []) for s in samples],
    }
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    tiny.language_model(folder / "model", sharp=0.3)
    (folder / "reward.py").write_text(REWARD)
    rows = [{"id": str(i), "prompt": f"Say {i} letters."} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "recipe.yaml").write_text(
        """
name: tiny
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 8}, heldout: {path: data.jsonl, heldout: 8}}
sampling: {max_new_tokens: 10}
rewards: [{name: reward.py, label: vowels}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 4, prompts_per_step: 3, group_size: 4, micro_batch_size: 6}
optim: {lr: 1.0e-3}
eval: {every: 2, samples: 8, temperature: 0.0}
checkpoint: {every: 1}
"""
    )
    return folder


def make(folder, *overrides):
    loaded = load_recipe([folder / "recipe.yaml"], [*overrides])
    return build(loaded.recipe)


def step(run, number=0):
    return train_step(run, number, Clock(torch.device("cpu")))


ALGORITHMS = {
    "grpo": "{type: grpo}",
    "dr_grpo": "{type: dr_grpo}",
    "rloo": "{type: rloo}",
    "reinforce_pp": "{type: reinforce_pp}",
    "reinforce_pp baseline": "{type: reinforce_pp, variant: baseline}",
    "dapo": "{type: dapo}",
    "gspo": "{type: gspo}",
    "gmpo": "{type: gmpo}",
    "cispo": "{type: cispo, entropy_coef: 0.01}",
    "sapo": "{type: sapo, kl_coef: 0.01, kl_estimator: k3+}",
    "drpo": "{type: drpo, epsilon: 0.05}",
    "ppo": "{type: ppo, critic_lr: 1.0e-3}",
    "capo": "{type: capo}",
    "raft": "{type: raft, keep: 2}",
    "sdpo": "{type: sdpo, success: 0.0}",
}


@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_runs_in_the_one_loop(folder, name, updates):
    rewards = ["rewards[0].name=reward.py:steps"] if name == "capo" else []
    run = make(folder, f"algorithm={ALGORITHMS[name]}", f"train.updates_per_step={updates}", *rewards)
    before = {k: p.detach().clone() for k, p in run.policy.trainable.items()}
    rows = [step(run, n)[0] for n in range(2)]
    assert any(not torch.equal(before[k], p) for k, p in run.policy.trainable.items())
    for row in rows:
        assert all(torch.isfinite(torch.tensor(float(v))) for v in row.values())
        assert all(describe(key) for key in row), [key for key in row if not describe(key)]
        assert row["policy/first_ratio_max_dev"] <= 1e-5
        assert row["mismatch/log_prob_gap_max"] < 1e-4
    if name == "ppo":
        assert rows[1]["value/grad_norm"] > 0
    if name == "capo":
        assert 0.1 < rows[0]["advantage/wrong_step_fraction"] < 0.6


@cache
def collected(setting="kl_coef: 0.0"):
    """A batch of the shipped recipe, of which some responses are cut and some groups are all alike."""
    loaded = load_recipe(["sums"], [f"algorithm={{type: grpo, {setting}}}", "sampling.max_new_tokens=32"])
    run = build(loaded.recipe)
    slots = run.controller.slots(0, run.prompts, run.recipe.train.prompts_per_step)
    return collect_batch(run, slots, 0, Clock(torch.device("cpu")), StepMetrics()), loaded.recipe.train.group_size


@pytest.mark.slow
def test_cut_responses_are_left_out_where_the_recipe_says_so():
    (plain, _), (masked, _) = collected(), collected("mask_truncated: true")
    cut = torch.tensor([plain.micro_batches[m].truncated[i].item() for m, i in plain.places])
    assert 0 < cut.sum() < len(cut), "the batch has both kinds"
    assert plain.weights.tolist() == [1.0] * len(cut)
    assert masked.weights.tolist() == (~cut).float().tolist()
    assert torch.equal(plain.advantages, masked.advantages), "their rewards count in their groups"


@pytest.mark.slow
def test_groups_without_an_advantage_are_left_out_where_the_recipe_says_so():
    (plain, size), (dropped, _) = collected(), collected("drop_zero_std_groups: true")
    flat = (plain.advantages.view(-1, size) == 0).all(1).repeat_interleave(size)
    assert 0 < flat.sum() < len(flat), "the batch has both kinds"
    assert dropped.weights.tolist() == (~flat).float().tolist()


def gradient(run):
    run.policy.apply = lambda: {}
    step(run)
    return torch.cat([p.grad.flatten() for p in run.policy.trainable.values()])


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_any_packing_has_the_same_gradient(folder, aggregation):
    algorithm = f"algorithm={{type: grpo, kl_coef: 0.0, aggregation: {aggregation}}}"
    sampled = "sampling.batch_size=6"
    whole = gradient(make(folder, algorithm, sampled, "train.micro_batch_size=12"))
    assert whole.norm() > 0
    bounded = ["train.micro_batch_size=12", "train.micro_batch_tokens=120"]
    for packing in (["train.micro_batch_size=1"], bounded, ["train.packing=true"], [*bounded, "train.packing=true"]):
        other = gradient(make(folder, algorithm, sampled, *packing))
        assert (other - whole).norm() < 1e-5 * whole.norm()


@pytest.mark.parametrize(
    "algorithm", ["{type: ppo}", "{type: gspo}", "{type: cispo, entropy_coef: 0.01}", "{type: sapo, kl_coef: 0.1}"]
)
def test_rows_in_lines_have_the_gradient_of_padded_ones(folder, algorithm):
    """With what is recomputed before the updates, the reference, a critic and an entropy bonus."""
    keys = [
        f"algorithm={algorithm}",
        "sampling.batch_size=6",
        "train.micro_batch_size=6",
        "train.micro_batch_tokens=200",
    ]
    padded = gradient(make(folder, *keys))
    assert padded.norm() > 0
    run = make(folder, *keys, "train.packing=true")
    lines = gradient(run)
    assert run.pipeline.packing is not None
    assert (lines - padded).norm() < 2e-5 * padded.norm()


@cache
def sampled_by(size):
    """A run and its batch of 24 responses, drawn ``size`` at a time."""
    small = ["train.prompts_per_step=6", "train.group_size=4", f"sampling.batch_size={size}"]
    loaded = load_recipe(["sums"], small)
    run = build(loaded.recipe)
    slots = run.controller.slots(0, run.prompts, 6)
    return run, collect_batch(run, slots, 0, Clock(torch.device("cpu")), StepMetrics())


@pytest.mark.parametrize("sampled", [4, 6, 24])
@pytest.mark.parametrize("updated", [4, 5, 24])
def test_a_slice_has_the_rows_that_its_columns_speak_of(sampled, updated):
    """Responses of differing length from several micro-batches: sorted by length they come in another order."""
    run, batch = sampled_by(sampled)
    train = run.recipe.train.model_copy(update={"micro_batch_size": updated})
    run = replace(run, recipe=run.recipe.model_copy(update={"train": train}))
    lengths = [int(batch.lengths[n]) for n in range(24)]
    assert len(set(lengths)) > 3
    seen = []
    for micro_batch in split_micro_batches(run, batch, list(range(24))):
        assert micro_batch.rows.ids == [batch.ids[n] for n in micro_batch.index]
        assert micro_batch.rows.padded("action_mask").sum(1).tolist() == [lengths[n] for n in micro_batch.index]
        assert torch.equal(micro_batch.old["advantages"], batch.advantages[micro_batch.index])
        seen += micro_batch.index
    assert sorted(seen) == list(range(24))
    assert seen != sorted(seen)


def test_a_token_budget_bounds_every_slice(folder):
    run = make(folder, "train.micro_batch_size=12", "train.micro_batch_tokens=120")
    shapes = []
    forward = run.pipeline.policy.forward

    def watched(*args, **kwargs):
        if torch.is_grad_enabled():
            shapes.append(kwargs["input_ids"].shape)
        return forward(*args, **kwargs)

    run.pipeline.policy.forward = watched
    step(run)
    assert sum(rows for rows, _ in shapes) == 12
    assert max(rows for rows, _ in shapes) > 1
    assert all(rows * length <= 120 or rows == 1 for rows, length in shapes)


def test_dynamic_sampling_fills_slots_with_groups_that_differ(folder):
    algorithm = "algorithm={type: grpo, kl_coef: 0.0, dynamic_sampling: true, max_attempts: 6}"
    run = make(folder, algorithm, "rewards[0].name=reward.py:rare")
    rows = [step(run, n)[0] for n in range(3)]
    assert any(row["sampling/rounds"] > 1 for row in rows)
    plain = [step(make(folder, "rewards[0].name=reward.py:rare"), n)[0] for n in range(3)]
    filled, unfilled = (sum(r["advantage/zero_std_groups"] for r in some) for some in (rows, plain))
    assert filled < unfilled
    assert all(row["sampling/groups"] >= 3 for row in rows)


def test_a_replacement_is_the_same_whoever_draws_it():
    prompts = [Prompt(str(i), str(i)) for i in range(50)]
    slot = Slot(3, 1, 0, prompts[0])
    drawn = [Controller(7).replacement(slot, attempt, prompts) for attempt in range(1, 20)]
    assert drawn == [Controller(7).replacement(slot, attempt, prompts) for attempt in range(1, 20)]
    assert len({s.prompt.id for s in drawn}) > 10
    assert [s.attempt for s in drawn] == list(range(1, 20))
    assert {(s.step, s.index) for s in drawn} == {(3, 1)}


def rows_of(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "plan/", "features/"))} for row in rows
    ]


RESAMPLED = ["algorithm={type: dapo, max_attempts: 6}", "rewards[0].name=reward.py:rare"]
RESUMED = {"full": [], "ppo lora": ["algorithm={type: ppo}", "model.lora={rank: 2}"], "resampled": RESAMPLED}


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [pytest.param(words, id=name, marks=[pytest.mark.slow] * (name != "ppo lora")) for name, words in RESUMED.items()],
)
def test_a_resumed_run_takes_the_steps_that_would_have_come(folder, tmp_path, overrides):
    loaded = load_recipe([folder / "recipe.yaml"], overrides)
    train(loaded, tmp_path / "whole")
    part = load_recipe([folder / "recipe.yaml"], [*overrides, "train.steps=2"])
    train(part, tmp_path / "cut")
    other = RunDir(tmp_path / "cut").of_controller(1)  # as if there had been two, and both were killed in step 4
    for n in (1, 4):
        other.failure(n, "reward", "a prompt", "no score")
    train(loaded, tmp_path / "cut", resume=True)
    assert [json.loads(line)["step"] for line in other.failures.read_text().splitlines()] == [1]
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    held = [(tmp_path / name / "heldout.jsonl").read_text() for name in ("whole", "cut")]
    assert held[0] == held[1]


def test_what_the_run_leaves_behind(folder, tmp_path):
    train(load_recipe([folder / "recipe.yaml"], ["train.steps=2"]), tmp_path / "run")
    listing = json.loads((tmp_path / "run" / "samples" / "step_000002.json").read_text())
    assert len(listing["samples"]) == 8
    assert {"prompt", "text", "truncated", "scores"} <= listing["samples"][0].keys()
    assert os.path.getsize(tmp_path / "run" / "report.html") > 1000


@pytest.mark.slow
def test_the_policy_learns_on_prompts_it_never_saw(folder, tmp_path):
    overrides = ["train.steps=60", "train.prompts_per_step=8", "train.group_size=8", "train.micro_batch_size=64"]
    train(load_recipe([folder / "recipe.yaml"], [*overrides, "eval.every=60", "optim.lr=1e-2"]), tmp_path / "run")
    held = [json.loads(line)["reward/vowels"] for line in (tmp_path / "run" / "heldout.jsonl").read_text().splitlines()]
    assert held[-1] > held[0] + 0.3, held
