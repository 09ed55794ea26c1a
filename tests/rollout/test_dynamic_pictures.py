"""Dynamic sampling of pictures: groups whose rewards are all equal are drawn anew, whoever draws them."""

import json
from dataclasses import replace

import pytest
import torch

from mmrl.app.build import build
from mmrl.app.trainer import Trainer
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.core.clock import Clock
from mmrl.core.signals import Stop
from mmrl.logging.rundir import RunDir
from mmrl.training.loop import train_step
from tests.support.tiny_diffusion import two_blocks

FEW = '''
import mmrl, zlib

@mmrl.reward(inputs=("image",))
def few(samples, *, context):
    """All equal for two prompts of three."""
    return [float(zlib.crc32(s.prompt.text.encode()) % 3 == 0 and s.id.sample == 0) for s in samples]
'''
SMALL = [
    *("sampling.steps=3", "sampling.window={size: 1}", "train.prompts_per_step=3", "train.group_size=2"),
    *(
        "train.micro_batch_size=4",
        "train.steps=2",
        "eval.every=null",
        "checkpoint.every=1",
        "sampling.guidance_scale=1",
    ),
]


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """What load_recipe takes, with an algorithm to be added."""
    folder = tmp_path_factory.mktemp("dynamic")
    (folder / "reward.py").write_text(FEW)
    return [f"model.path={two_blocks()}", *SMALL, f"rewards=[{{name: '{folder / 'reward.py'}:few'}}]"]


def made(asked, *changes):
    loaded = load_recipe(["shapes-lora"], [*asked, *changes])
    return build(loaded.recipe)


def standing(run, n=0):
    """The slots and attempts that a step trains, its row, and the advantages."""
    kept = []
    attempts = run.rollout.parts["attempts"]
    run.rollout.parts["end"] = type("End", (), {"end_step": lambda self, _, done: kept.append(done.batch) or {}})()
    row, _ = train_step(run, n, Clock(torch.device("cpu")))
    del run.rollout.parts["end"]
    assert attempts.valid < 1
    (batch,) = kept
    return {(i.slot, i.attempt, i.sample) for i in batch.ids}, row, batch.advantages


DYNAMIC = ["algorithm.dynamic_sampling=true", "algorithm.max_attempts=20"]


@pytest.mark.slow
def test_flat_groups_are_replaced_and_the_first_ratio_is_one(asked):
    run = made(asked, *DYNAMIC)
    ids, row, advantages = standing(run)
    assert any(attempt for _, attempt, _ in ids), "of three slots one at least is flat at first"
    assert len(ids) == 6
    assert row["advantage/zero_std_groups"] == 0
    assert (advantages != 0).all()
    assert row["policy/first_ratio_max_dev"] == 0
    assert row["mismatch/log_prob_gap_max"] < 1e-4
    assert row["sampling/rounds"] > 1
    assert row["sampling/groups"] > 3
    again, same, _ = standing(made(asked, *DYNAMIC))
    assert again == ids
    assert same["optim/grad_norm"] == row["optim/grad_norm"]
    plain, _ = train_step(made(asked), 0, Clock(torch.device("cpu")))
    assert plain["advantage/zero_std_groups"] > 0
    assert len(run.pipeline.features) >= 3
    assert run.pipeline.features.held == 0, "those of replaced groups are let go, too"


def test_two_controllers_keep_the_same_groups(asked):
    run = made(asked, *DYNAMIC)
    whole, _, _ = standing(run)
    parts = []
    for rank in range(2):
        run.rollout.parts["attempts"].valid = 1.0
        parts.append(standing(replace(run, controller=Controller(run.recipe.seed, rank, 2)))[0])
    assert parts[0] | parts[1] == whole
    assert not parts[0] & parts[1]


def test_a_forward_process_has_them_too(asked):
    changes = ["sampling.window=null", "sampling.same_initial_noise=false", "algorithm={type: diffusion_nft, "]
    changes[-1] += "dynamic_sampling: true, max_attempts: 20, noise_levels: 1}"
    ids, row, _ = standing(made(asked, *changes))
    assert any(attempt for _, attempt, _ in ids)
    assert row["advantage/zero_std_groups"] == 0


@pytest.mark.slow
def test_a_resumed_run_draws_as_if_it_had_not_stopped(asked, tmp_path):
    def train(out, *changes, resume=False):
        loaded = load_recipe(["shapes-lora"], [*asked, *DYNAMIC, *changes])
        with RunDir.create(out, resume=resume) as directory:
            directory.write_recipe(loaded.paths, loaded.overrides, loaded.resolved())
            assert Trainer(loaded, directory).begin(Stop(), resume=resume).error is None
        lines = (out / "metrics.jsonl").read_text().splitlines()
        timed = ("time/", "perf/", "plan/", "features/")  # a fresh process has not encoded the first step's prompts
        return [{k: v for k, v in json.loads(x).items() if not k.startswith(timed)} for x in lines]

    train(tmp_path / "parts", "train.steps=1")
    resumed, whole = train(tmp_path / "parts", resume=True), train(tmp_path / "whole")
    assert [row.items() - other.items() for row, other in zip(resumed, whole, strict=True)] == [set(), set()]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["algorithm={type: grpo_guard, dynamic_sampling: true}", "model.dtype=bfloat16"],
            "changes the rounding of bfloat16",
        ),
        (
            ["algorithm.dynamic_sampling=true", "devices_per_controller=2", "placement={type: disaggregated}"],
            "would be encoded while a different step trains",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, said):
    with pytest.raises(RecipeError, match=said):
        load_recipe(["shapes-lora"], changes)
