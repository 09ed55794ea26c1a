"""Pruned groups and branches are the same wherever they are sampled: two devices, two controllers, a resumed run."""

import shutil

import pytest

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support.runs import alike, rows, run

allow_cpu_only()  # before transformers imports torchvision

PRUNED = [
    *("sampling.steps=4", "sampling.same_initial_noise=false", "model.dtype=float32"),
    *("train.prompts_per_step=2", "train.group_size=4", "train.micro_batch_size=4", "train.steps=2"),
    *("sampling.window={size: 1, first: 2}", "midway={step: 1, group_size: 6, branches: 2}"),
    *("eval.samples=4", "eval.every=null", "checkpoint.every=1"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("pruned") / "alone"
    run("shapes-lora", out, *PRUNED)
    return out


def test_two_controllers_of_two_devices_keep_the_same_samples(alone, tmp_path):
    out = tmp_path / "two"
    run("shapes-lora", out, *PRUNED, "controllers=2", "devices_per_controller=2")
    alike(alone, out)
    for name in ("midway/kept_std", "midway/mean_shift", "midway/dropped", "midway/branch_std"):
        assert rows(out)[-1][name] == pytest.approx(rows(alone)[-1][name], rel=1e-4)


def test_a_resumed_run_keeps_the_same_samples(alone, tmp_path):
    out = tmp_path / "resumed"
    shutil.copytree(alone, out)
    shutil.rmtree(out / "checkpoints" / "step_000002")
    run("shapes-lora", out, *PRUNED, "--resume")
    assert [row["midway/mean_shift"] for row in rows(out)] == [row["midway/mean_shift"] for row in rows(alone)]
    alike(alone, out)


TEXT = [
    *("train.prompts_per_step=2", "train.group_size=4", "train.micro_batch_size=4", "train.steps=2"),
    *("sampling.batch_size=6", "midway={tokens: 10, group_size: 6, keep: best, branches: 2}"),
    *("algorithm={type: grpo, dynamic_sampling: true, max_attempts: 3, kl_coef: 0}",),
    *("eval.samples=4", "eval.every=null", "checkpoint.every=1"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    out = tmp_path_factory.mktemp("pruned") / "text"
    run("sums", out, *TEXT)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        pytest.param(["devices_per_controller=2"], marks=pytest.mark.long),
        ["controllers=2", "devices_per_controller=2"],
    ],
)
def test_text_is_pruned_and_branches_alike_on_several_devices_and_controllers(text, tmp_path, where):
    out = tmp_path / "two"
    run("sums", out, *TEXT, *where)
    alike(text, out)
    for name in (
        "midway/begun_std",
        "midway/mean_shift",
        "midway/dropped",
        "midway/tokens_dropped",
        "midway/branch_std",
    ):
        assert rows(out)[-1][name] == pytest.approx(rows(text)[-1][name], rel=1e-4)


@pytest.mark.slow
def test_a_resumed_run_of_text_is_the_same(text, tmp_path):
    out = tmp_path / "resumed"
    shutil.copytree(text, out)
    shutil.rmtree(out / "checkpoints" / "step_000002")
    run("sums", out, *TEXT, "--resume")
    assert (out / "checkpoints" / "step_000002").exists()
    names = ("midway/tokens_dropped", "midway/mean_shift", "reward/mean", "optim/grad_norm")
    assert [[row[n] for n in names] for row in rows(out)] == [[row[n] for n in names] for row in rows(text)]
    alike(text, out)
