"""The plan of text against the run: what it says a step takes is what a step takes, within a tenth, both ways."""

import gc
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.controller.workload_balance import LAUNCH, packing_cost
from mmrl.core.clock import Clock
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.counts import count
from mmrl.planner.fake_tensors import LiveBytes
from mmrl.planner.gpus import GPUS
from mmrl.planner.plan import plan
from mmrl.step.micro_batches import packed
from mmrl.training.loop import train_step
from tests.support import tiny
from tests.support.plan_text import RECIPE, REWARD, ratio_of

allow_cpu_only()

META = "meta=[chosen, rejected]"
PAIRS = ["rewards=[]", "train.group_size=1", f"data.train.{META}", f"data.heldout.{META}"]
HALF = ["model.dtype=bfloat16"]
LORA = ["model.lora={rank: 4}"]
KL = ["algorithm.kl_coef=0.1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    tiny.language_model(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    pair = {"chosen": "aeiou" * 4, "rejected": "x" * 18}
    rows = [{"prompt": f"Say {i + 10} letters" + "!" * (i % 4), **pair} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def planned(folder, *changes):
    return plan(load_recipe([folder / "recipe.yaml"], changes))


def ratio(folder, *changes):
    """What the plan says over what is; the feature store fills over a whole run, so its real size counts."""
    return ratio_of(load_recipe([folder / "recipe.yaml"], changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(KL, id="full, reference"),
        pytest.param([*LORA, *KL, "train.updates_per_step=2"], id="lora, reference", marks=pytest.mark.long),
        pytest.param([*LORA, *HALF], id="lora, half", marks=pytest.mark.slow),
        pytest.param([*HALF, "model.gradient_checkpointing=true"], id="half, checkpointing", marks=pytest.mark.long),
        pytest.param(["algorithm={type: ppo}", "optim.ema_decay=0.9"], id="critic"),
        pytest.param(["algorithm={type: gspo, kl_coef: 0.0, entropy_coef: 0.1}"], id="entropy", marks=pytest.mark.long),
        pytest.param(
            ["train.micro_batch_size=24", "train.micro_batch_tokens=300"], id="packed", marks=pytest.mark.long
        ),
        pytest.param(
            ["sampling.batch_size=24", "train.micro_batch_size=1"], id="sampling is the peak", marks=pytest.mark.slow
        ),
        pytest.param([*PAIRS, "algorithm={type: dpo}"], id="dpo", marks=pytest.mark.slow),
        pytest.param([*PAIRS, "algorithm={type: reward_model}", "pipeline=llm/score"], id="reward model"),
    ],
)
def test_a_real_step_takes_what_the_plan_says_within_a_tenth(folder, changes):
    assert 0.9 < ratio(folder, *changes) < 1.1


SEES = ["pipeline=vlm/chat", "data={name: scenes, train: {size: 42}, heldout: {size: 42}}", "sampling.max_new_tokens=4"]

ONE = [f"data.{split}={{size: 42, questions: [colour, count]}}" for split in ("train", "heldout")]
"""Questions about one picture."""


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("qwen2_5_vl", KL, id="qwen2.5"),
        pytest.param("qwen2_5_vl", [*LORA, *HALF], id="qwen2.5, lora", marks=pytest.mark.long),
        pytest.param("qwen3_vl", ["model.freeze=[visual]"], id="qwen3, frozen vision", marks=pytest.mark.long),
        pytest.param("smolvlm", ONE, id="smolvlm", marks=pytest.mark.slow),
    ],
)
def test_a_real_step_of_a_model_that_sees_takes_what_the_plan_says(folder, tmp_path, kind, changes):
    """A row of the plan has the most pictures there are, so that it says more than most steps take."""
    pytest.importorskip("torchvision")
    if kind == "smolvlm":
        pytest.importorskip("num2words")
    tiny.vision_model(tmp_path / "model", kind)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert 0.9 < ratio(tmp_path, *SEES, *changes) < 1.15


@pytest.mark.long  # in short: the cases within a tenth, above
def test_the_shipped_recipe_takes_what_the_plan_says(tmp_path):
    """Tensors within a tenth; resident memory beyond that of the imports within two fifths."""
    loaded = load_recipe(["sums"], [])
    assert 0.9 < ratio_of(loaded) < 1.1
    done = subprocess.run(
        [sys.executable, "-m", "tests.planner.test_plan_text"],
        capture_output=True,
        text=True,
        timeout=1800,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # so that freed memory goes back
    )
    assert done.returncode == 0, done.stderr[-3000:]
    grew = int(done.stdout.splitlines()[-1])
    said = plan(loaded).peak.total
    print(f"said {said / 2**20:.0f} MiB, resident memory grew by {grew / 2**20:.0f} MiB")
    assert 0.7 < said / grew < 1.4


def test_gradient_checkpointing_changes_the_memory_and_nothing_else(folder):
    def after_a_step(*changes):
        loaded = load_recipe([folder / "recipe.yaml"], ["train.micro_batch_size=24", *changes])
        run = build(loaded.recipe)
        with LiveBytes() as live:
            train_step(run, 0, Clock(torch.device("cpu")))
        return run, live.peak

    plain, more = after_a_step()
    saving, less = after_a_step("model.gradient_checkpointing=true")
    assert less < 0.9 * more
    for (name, ours), theirs in zip(saving.policy.trainable.items(), plain.policy.trainable.values(), strict=True):
        assert torch.equal(ours, theirs), name


# -- roles and counts ------------------------------------------------------------------------------------------------


def test_the_roles_of_a_critic_and_an_engine(folder):
    made = planned(folder, "algorithm={type: ppo, kl_coef: 0.05}")
    roles = {role.name: role for role in made.roles}
    policy, critic = roles["policy, trained"].parameters, roles["critic, trained"].parameters
    assert critic == policy + 32 + 1, "the head is a number for each of 32 dimensions; the embedding was tied"
    assert roles["gradients, critic"].bytes == 4 * critic
    assert roles["copy: reference"].parameters == policy
    assert roles["optimizer"].parameters == 2 * (policy + critic)
    kept, tokens = made.measured.trajectory, made.counts.row_tokens
    assert tokens > 12
    assert tokens * (8 + 4 + 1) <= kept <= tokens * (8 + 4 + 1) + 8, (
        "a token, its log-prob, its mask; whether it was cut"
    )


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        (["rollout.engine=vllm", "device=cuda"], int(0.4 * 2**33)),
        (["rollout={engine: vllm, options: {gpu_memory_utilization: 0.25}}", "device=cuda"], 2**31),
        (["rollout.engine=vllm_server", "device=cuda"], int(0.92 * 2**33)),
        (["rollout={engine: vllm_server, options: {environment: {CUDA_VISIBLE_DEVICES: '1'}}}", "device=cuda"], 0),
        (["rollout={engine: vllm, options: {kv_cache_memory_bytes: 1000}}"], None),
    ],
)
def test_an_engine_takes_what_was_configured_or_its_default(folder, changes, size):
    made = plan(load_recipe([folder / "recipe.yaml"], changes), device_memory=2**33)
    engine = next(role for role in made.roles if role.name == "engine")
    weights = next(role.parameters for role in made.roles if role.name == "policy, trained")
    assert engine.bytes == (4 * weights + 1000 if size is None else size)
    assert all(phase.parts.get("engine", 0) == engine.bytes for phase in made.phases)


@cache
def sums_recipe():
    return load_recipe(["sums"]).recipe


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=40),
    most=st.integers(1, 9),
    room=st.integers(90, 400),
)
@settings(deadline=None)
def test_no_step_is_more_work_than_the_slices_that_the_plan_counts(lengths, most, room):
    base = sums_recipe()
    train = base.train.model_copy(
        update={
            "prompts_per_step": len(lengths),
            "group_size": 1,
            "micro_batch_size": most,
            "micro_batch_tokens": room,
        }
    )
    counts = count(base.model_copy(update={"train": train}), 1, sampled=True, row_tokens=max(lengths))
    sizes = [(n,) for n in lengths]
    pieces = list(packed(list(range(len(lengths))), sizes, most, room))
    full = counts.slice_rows * max(lengths)
    assert packing_cost(sizes, pieces, quadratic=0) <= counts.slices * (full + LAUNCH)
    assert max(len(p) * max(lengths[n] for n in p) for p in pieces) <= max(room, max(lengths))


def test_the_longest_prompt_is_the_one_that_counts(folder, tmp_path):
    rows = [{"prompt": "a" * n} for n in (5, 60, 7, 30)] * 3
    (folder / "long.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = [f"data.{split}={{path: {folder / 'long.jsonl'}, heldout: 0}}" for split in ("train", "heldout")]
    template = len("SuserN" + "EN" + "SassistantN")  # a token for each control token, newline and byte
    assert planned(folder, *data).counts.row_tokens == 60 + template + 12


# -- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["sampling.max_new_tokens=256"], "256 tokens leave no room for a prompt in the model's context of 256"),
        (["sampling.max_new_tokens=240"], "does not fit into the model's context of 256"),
        (["sampling.max_prompt_tokens=10"], "and sampling.max_prompt_tokens is 10"),
        (["model.path=gone"], "cannot be read here"),
        (["model.freeze=[nothing]"], "the model has no module 'nothing'"),
        (["model.lora={targets: [nothing]}"], "model.lora.targets"),
        (["model.path=gone", "architecture=reward.py"], "cannot be read as configuration files"),
        (["pipeline=llm/score"], "set pipeline: llm/chat"),
    ],
)
def test_what_cannot_run_is_a_problem(folder, changes, message):
    assert any(message in problem for problem in planned(folder, *changes).problems)


def test_a_folder_without_a_chat_template_is_refused_and_weights_are_missed_here_alone(folder, tmp_path):
    tiny.language_model(tmp_path)
    assert planned(folder, f"model.path={tmp_path}").problems == []
    (tmp_path / "model.safetensors").unlink()
    (problem,) = planned(folder, f"model.path={tmp_path}").problems
    assert "has no weights" in problem
    loaded = load_recipe([folder / "recipe.yaml"], [f"model.path={tmp_path}"])
    assert plan(loaded, gpu=GPUS["h100-80g"]).problems == []  # of another machine, where they may be
    (tmp_path / "chat_template.jinja").unlink()
    assert "has no chat template" in planned(folder, f"model.path={tmp_path}").problems[0]


if __name__ == "__main__":  # a step in a process of its own: bytes that its resident memory grew by
    from tests.support.planning import PeakRss, resident

    small = load_recipe(["sums"], ["train.prompts_per_step=1", "train.group_size=2"])
    train_step(build(small.recipe), 0, Clock(torch.device("cpu")))  # imports, and the libraries' own
    gc.collect()
    before = resident()
    with PeakRss() as rss:
        opened = build((loaded := load_recipe(["sums"], [])).recipe)
        train_step(opened, 0, Clock(torch.device("cpu")))
    print(rss.peak - before)
