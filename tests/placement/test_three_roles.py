"""Devices that move between sampling and judging while others train and are lent: equal outcomes, refusals."""

import re
from functools import partial

import pytest
import torch

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.config.placement import Placement
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.placement import adaptive
from mmrl.placement.adaptive import Split
from mmrl.placement.multi_device import MultiDevice
from mmrl.placement.simulated_devices import SimulatedDevices, SimulatedTask
from mmrl.placement.tasks import LENT
from mmrl.training.loop import train_step
from tests.support import runs
from tests.support.lending import SMALL, Begins, Slow, Watched
from tests.support.three_roles import BRIGHT, JUDGE
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()  # before transformers imports torchvision

THREE = "split: adaptive, lend: true"


def opened(tmp_path, name, how):
    """A run of three devices, of which the first trains."""
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE)
    words = [*SMALL, "devices_per_controller=3", f"placement={{type: disaggregated, trainers: 1, {how}}}"]
    if name == "sums":
        words += ["optim.lr=1e-4", "optim.warmup_steps=0", f'rewards=[{{name: "{judge}:score", batch_size: 4}}]']
    elif name == "scenes-judge":
        words += ["rewards.0.batch_size=4", "optim.lr=1e-4", "optim.warmup_steps=0", "model.dtype=float32"]
    elif name == "moving-shapes":  # its own reward is a program, which needs no device
        judge.write_text(BRIGHT)
        words += [f'rewards=[{{name: "{judge}:score", batch_size: 4}}]', "sampling.steps=4", "optim.lr=1e-4"]
        words += ["train.prompts_per_step=3"]
    else:
        words += [f"model.path={two_blocks()}", "rewards.0.batch_size=4", "sampling.steps=4", "optim.lr=1e-4"]
        words += ["train.prompts_per_step=3"]
    loaded = load_recipe([name], words)
    others = [Slow(build(loaded.recipe), 0.1) for _ in range(2)]
    devices = Watched(others, loaded.recipe.placement)
    run = build(loaded.recipe, devices=devices)
    if loaded.recipe.placement.lend:
        devices.begin_by(Begins(others=2, lent=1, judged=True))
    devices.open(run)
    return run, devices


def beginning(run, how):
    """The devices of a run that begins, as ``how`` says, without anything to do."""
    words = ["devices_per_controller=3", f"placement={{type: disaggregated, trainers: 1, {how}}}"]
    devices = MultiDevice([Slow(None, 0.0)] * 2, load_recipe(["sums"], words).recipe.placement)
    devices.open(run)
    devices.close()
    return devices


def trained(tmp_path, name, how, steps=3):
    run, devices = opened(tmp_path, name, how)
    try:
        rows = [train_step(run, n, Clock(torch.device("cpu")))[0] for n in range(steps)]
    finally:
        devices.close()
    return run, devices, rows


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("scenes-judge", "shapes-judge", "moving-shapes")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sums", *OTHERS])
def test_samples_and_weights_are_those_of_devices_that_keep_their_role(tmp_path, name):
    if name.endswith("-judge"):
        pytest.importorskip("torchvision")
    alone, fixed, before = trained(tmp_path, name, "judges: 1")
    moved, moves, after = trained(tmp_path, name, THREE)
    did = {d: {e.role for _, e in moves.rows if e.device == d} - {"wake"} for d in range(3)}
    assert {d: {e.role for _, e in fixed.rows if e.device == d} - {"wake"} for d in range(3)} == {
        0: {"train"},
        1: {"rollout"},
        2: {"judge"},
    }
    assert did[0] >= {"train"}
    assert len(did[0]) > 1
    assert any(did[d] >= {"rollout", "judge"} for d in (1, 2))
    assert fixed.drawn.keys() == moves.drawn.keys()
    for i, mine in moves.drawn.items():
        for key, value in vars(mine).items():
            other = getattr(fixed.drawn[i], key)
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other or key == "rows"
    for key, p in moved.policy.trainable.items():
        assert torch.equal(p, alone.policy.trainable[key]), key
    for mine, theirs in zip(after, before, strict=True):
        for key in ("reward/mean", "optim/grad_norm", "mismatch/weight_mean", "sampling/stale_steps"):
            assert mine.get(key) == theirs.get(key), key
    assert sum(row["placement/moves"] for row in after) > 0
    assert not fixed.decided
    assert len(moves.decided) == 3
    for line in moves.decided:
        assert line["rollout"] + line["judge"] == 2
        assert re.search("(stays|to .*), .*; .* that train", line["decision"])
        assert {"phase", "greedy", "best", "regret", "sampling", "judging", "price_back"} <= line["numbers"].keys()
        assert line["numbers"]["greedy"] > 0


@pytest.mark.slow
def test_the_policy_goes_on_where_a_checkpoint_stopped_it(tmp_path):
    run, devices = opened(tmp_path, "sums", THREE)
    try:
        for n in range(2):
            train_step(run, n, Clock(torch.device("cpu")))
        kept = devices.state_dict().numbers
    finally:
        devices.close()
    again = beginning(run, THREE)
    assert again.state != devices.state
    again.load_state_dict(kept, None)
    assert again.state == devices.state
    assert again.state.steps == 2
    other = beginning(run, "split: adaptive, inside: false")
    other.load_state_dict(kept, None)
    assert other.state == adaptive.State(2, Split(1, 1), "never", inside=False, ahead=True)


@pytest.mark.slow
def test_a_decision_that_cannot_be_leaves_a_greedy_split_beside_training(tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr("mmrl.placement.multi_device.notices.tell", heard.append)
    monkeypatch.setattr(
        adaptive,
        "decide",
        lambda state, tried: (
            adaptive.State(2, Split(0, 2), "never", ahead=True),
            adaptive.Decision(Split(0, 2), "so", {}),
        ),
    )
    _, devices, rows = trained(tmp_path, "sums", THREE)
    assert devices.settings == Placement(
        type="disaggregated", trainers=1, staleness=1, split="greedy", lend=True, judges=None
    )
    assert len(rows) == 3
    assert len(heard) == 1
    assert "the run goes on under a greedy split" in heard[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["placement={type: adaptive, split: greedy}"], "placement.split: .*placement.type to disaggregated"),
        (
            ["placement={type: disaggregated, split: adaptive}", "rollout.engine=vllm_server"],
            "split to fixed",
        ),
        (["placement={type: disaggregated, split: greedy, inside: false}"], "placement.inside: .*remove it"),
        (["placement={type: disaggregated, split: adaptive, inside: false}"], "or lower placement.trainers"),
        (["placement={type: disaggregated, split: adaptive, sleep: true}"], "placement.sleep: .*remove it"),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_the_edit(changes, message):
    with pytest.raises(UserError, match=message):
        load_recipe(["sums"], ["devices_per_controller=2", *changes])


@pytest.mark.slow
@pytest.mark.long  # in short: threads in one process, above
def test_two_controllers_learn_as_without_moves_though_a_device_is_killed(tmp_path):
    pytest.importorskip("ray")
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE)
    words = ["controllers=2", "devices_per_controller=3", f'rewards=[{{name: "{judge}:score", batch_size: 4}}]']
    words += [*SMALL, "train.prompts_per_step=8"]  # a controller has more micro-batches than devices that sample
    words += ["train.steps=5", "checkpoint.every=1", "eval.every=null", "optim.lr=1e-4", "optim.warmup_steps=0"]
    for name, how in (("fixed", "judges: 1"), ("lent", "judges: 1, lend: true")):
        runs.run("sums", tmp_path / name, *words, f"placement={{type: disaggregated, trainers: 1, {how}}}")
    out = tmp_path / "moved"
    process = runs.train("sums", out, *words, f"placement={{type: disaggregated, trainers: 1, {THREE}}}")
    runs.wait_for(process, out, 2)
    runs.actors(process)[-1].kill()  # one that samples and judges
    code, said = runs.ended(process)
    assert code == 0, said
    assert "all controllers start again after step" in said
    for other in ("lent", "moved"):
        for mine, theirs in zip(runs.rows(tmp_path / other), runs.rows(tmp_path / "fixed"), strict=True):
            for key in ("reward/mean", "optim/grad_norm", "mismatch/weight_mean", "sampling/stale_steps"):
                assert mine[key] == theirs[key], (other, mine["step"], key)
        for file in ("weights", "optimizer", "ahead"):
            whole = [tmp_path / n / "checkpoints" / "step_000005" / f"{file}.safetensors" for n in ("fixed", other)]
            assert whole[0].read_bytes() == whole[1].read_bytes(), (other, file)
    lines = runs.placed(out)
    assert {line["controller"] for line in lines if line.get("device") == 0 and line["role"] in LENT} == {0, 1}
    assert {line["role"] for line in lines if line.get("device") == 2} >= {"rollout", "judge"}
    assert [line["step"] for line in lines if "decision" in line] == [1, 2, 3, 4, 5]


def test_a_simulated_device_that_moves_keeps_its_judge_and_loads_new_weights_once():
    devices = SimulatedDevices(2, 5.0, back=3.0)
    devices.apart(Split(1, 0), "worth")
    task = partial(SimulatedTask, seconds=1.0, then=lambda: None)
    sample, judge = (lambda updates: task("rollout", updates=updates)), task("judge")
    moved = [devices._turn(1, one) for one in (sample(0), judge, judge, sample(0), judge, sample(1), sample(2), judge)]
    assert moved == [0.0, 5.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0]
    assert devices._turn(0, task("judge")) == 5.0  # it trains, and is lent
    devices.warm()
    assert devices._turn(0, task("judge")) == 0.0
