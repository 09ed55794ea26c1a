"""Devices that train and are lent to sampling and judging while they wait: equal outcomes, and back for the update."""

import re
import threading
import time

import pytest
import torch

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.config.placement import Placement
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.models.policy import Version
from mmrl.placement import device_tasks, lending
from mmrl.placement.adaptive import Split, worth_lending
from mmrl.placement.scheduler import Scheduler
from mmrl.placement.simulated_devices import SimulatedTask
from mmrl.placement.task_queue import Task, TaskQueue
from mmrl.training.loop import train_step
from tests.support import runs
from tests.support.lending import SMALL, Begins, Slow, Watched, task
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()  # before transformers imports torchvision

TEXT = ["sums", *SMALL, "optim.lr=0.01", "optim.warmup_steps=0"]
# at a low temperature many groups are flat and replaced; each micro-batch is of one group
REPLACED = [*TEXT, "optim.lr=0.0003", "algorithm={type: dapo, max_attempts: 4}", "sampling.temperature=0.3"]
PICTURES = ["shapes-lora", *SMALL, "sampling.steps=4", "sampling.window={size: 2}", "optim.lr=0.01"]
FORWARD = ["shapes-nft", *SMALL, "sampling.steps=4", "algorithm.noise_levels=2", "algorithm.old_decay_rate=0.2"]


def opened(recipe, lend, staleness=1, pause=0.15):
    """A run of two devices: the first trains, the second samples."""
    name, *changes = recipe
    settings = f"placement={{type: disaggregated, staleness: {staleness}, lend: {str(lend).lower()}}}"
    less = [f"model.path={two_blocks()}"] if name.startswith("shapes") else []
    loaded = load_recipe([name], [*less, *changes, "devices_per_controller=2", settings])
    devices = Watched([Slow(build(loaded.recipe), pause)], loaded.recipe.placement)
    run = build(loaded.recipe, devices=devices)
    if lend:
        devices.begin_by(Begins())
    devices.open(run)
    return run, devices


def trained(recipe, lend, staleness, steps=3):
    run, devices = opened(recipe, lend, staleness)
    try:
        rows = [train_step(run, n, Clock(torch.device("cpu")))[0] for n in range(steps)]
    finally:
        devices.close()
    return run, devices, rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "staleness"),
    [
        (TEXT, 1),
        (PICTURES, 1),
        pytest.param(TEXT, 2, marks=pytest.mark.slow),
        pytest.param(REPLACED, 1, marks=pytest.mark.slow),
        pytest.param(FORWARD, 1, marks=pytest.mark.slow),
    ],
    ids=["text", "pictures", "text, older", "text, replaced groups", "old policy"],
)
def test_samples_and_weights_are_equal_to_the_bit_with_and_without_lending(recipe, staleness):
    alone, fixed, before = trained(recipe, lend=False, staleness=staleness)
    shared, lends, after = trained(recipe, lend=True, staleness=staleness)
    who = {e.device for _, e in lends.rows if e.role == "rollout"}
    assert {e.device for _, e in fixed.rows if e.role == "rollout"} == {1}
    assert who == {0, 1}
    assert sum(row["placement/lent"] for row in after) >= 2
    assert fixed.drawn.keys() == lends.drawn.keys()
    for i, mine in lends.drawn.items():
        for name, value in vars(mine).items():
            other = getattr(fixed.drawn[i], name)
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other or name == "rows", (
                name
            )
    for name, p in shared.policy.trainable.items():
        assert torch.equal(p, alone.policy.trainable[name]), name
    assert shared.policy.tag == alone.policy.tag
    assert shared.compute.local.borrowed is None
    assert not fixed.decided
    for line, row in zip(lends.decided, after, strict=True):
        lent = int(row["placement/lent"])
        said = f"1 device that trains sampled {lent} micro-batch{'es' * (lent > 1)} while waiting"
        assert line["decision"] == (said if lent else line["decision"])
        assert (line["numbers"]["sampling"] > 0) == (lent > 0)
    for mine, theirs in zip(after, before, strict=True):
        for key in ("reward/mean", "optim/grad_norm", "mismatch/weight_mean", "sampling/stale_steps"):
            assert mine.get(key) == theirs.get(key), key


@pytest.mark.slow
def test_a_task_that_fails_on_a_lent_device_fails_the_step_and_leaves_its_weights_alone(monkeypatch):
    run, devices = opened(TEXT, lend=True)
    before = {name: p.detach().clone() for name, p in run.policy.trainable.items()}
    sample = device_tasks._drawn

    def failing(context, *given):
        if context is run and context.compute.local.borrowed is not None:
            with torch.no_grad():
                assert any(not torch.equal(p, before[name]) for name, p in run.policy.trainable.items())
            raise UserError("no more of this")
        return sample(context, *given)

    monkeypatch.setattr(device_tasks, "_drawn", failing)
    try:
        train_step(run, 0, Clock(torch.device("cpu")))
        before.update({name: p.detach().clone() for name, p in run.policy.trainable.items()})
        first = run.policy.tag
        with torch.no_grad():
            older = {name: p - 1 for name, p in before.items()}
        ahead = run.rollout.parts["ahead"]
        ahead._begun.pop(1).ended.result()  # the devices that sample are idle
        devices.begin_by(Begins(lent=1))
        ahead._versions[0] = Version(0, "current", older)
        with pytest.raises(UserError, match="no more of this"):
            train_step(run, 1, Clock(torch.device("cpu")))
    finally:
        devices.close()
    assert run.policy.tag == first
    assert all(torch.equal(p, before[name]) for name, p in run.policy.trainable.items())
    assert run.compute.local.borrowed is None


def test_a_lent_device_is_back_before_the_window_ends_and_gets_nothing_after_it():
    board, done, back = TaskQueue(2, Placement()), [], threading.Event()
    board.apart(Split(1, 0))
    board.scheduler._seconds["rollout"] = 1.0

    def works(device):
        while (task := board.take(device)) is not None:
            if task.call is not lending.give_back:
                time.sleep(0.1)
            done.append((device, task.call, time.perf_counter()))
            board.done(device, task.role, 0.0, 0.0, 0.1)
            task.answer.set_result(None)

    threads = [threading.Thread(target=works, args=(device,), daemon=True) for device in range(2)]
    for thread in threads:
        thread.start()
    while board.scheduler.waiting != {0, 1}:
        time.sleep(0.005)
    with lending.window(board, 0, range(1)):
        for _ in range(4):
            board.put(Task("rollout", device_tasks.sample, (), of=(0, 0)))
        while not any(device == 0 for device, *_ in done):
            time.sleep(0.005)
    left, device_0 = time.perf_counter(), [one for one in done if one[0] == 0]
    assert device_0[-1][1] is lending.give_back
    assert device_0[-1][2] <= left
    last = [board.put(Task("rollout", device_tasks.sample, (), of=(1, 0))) for _ in range(3)]
    for answer in last:
        answer.result()
    assert not back.is_set()
    assert [one for one in done if one[0] == 0] == device_0
    board.close()


def test_a_lost_device_is_told_where_its_window_ends():
    board = TaskQueue(2, Placement())
    board.apart(Split(1, 0))
    with pytest.raises(RuntimeError, match="device 0 is gone"), lending.window(board, 0, range(1)):
        board.fail(0, RuntimeError("device 0 is gone"))


def lender(devices, split, step, **seconds):
    """A scheduler whose devices are all idle, and which has measured ``seconds`` of a task of each role."""
    scheduler = Scheduler(devices, lambda: 0.0, Placement())
    scheduler.apart(split)
    scheduler._seconds.update(seconds)
    for device in range(devices):
        scheduler.idle(device)
    scheduler.lend(step)
    return scheduler


def test_a_device_that_waits_samples_first_and_then_judges_for_the_step_that_trains_next():
    scheduler = lender(3, Split(1, 1), 4, rollout=1.0, judge=0.2)
    sampled, judged = [task("rollout", 4) for _ in range(2)], [task("judge", 4) for _ in range(3)]
    later = task("rollout", 5)
    for one in (*sampled, later, *judged):
        scheduler.ready(one)
    assert scheduler.handed() == [(1, sampled[0]), (2, judged[0]), (0, sampled[1])]
    scheduler.done(0, "rollout", 0.0, 0.5, 1.0)
    scheduler.idle(0)
    assert scheduler.handed() == [(0, judged[1])]
    scheduler.recall()
    scheduler.done(0, "judge", 1.0, 1.0, 2.0)
    scheduler.idle(0)
    assert scheduler.handed() == []
    assert (scheduler.lent, scheduler.moves) == (2, 2)
    assert scheduler.prices == {"rollout": 0.5}


def test_its_own_training_goes_before_lending():
    scheduler = lender(2, Split(1, 0), 0, rollout=1.0)
    own = SimulatedTask("train", 1.0, lambda: None, device=0)
    for one in (task("rollout", 0), task("rollout", 0), own):
        scheduler.ready(one)
    assert sorted(device for device, _ in scheduler.handed()) == [0, 1]
    assert scheduler.taken[0] is own


@pytest.mark.parametrize(
    ("left", "devices", "task", "price", "back", "other", "worth"),
    [
        (4.0, 2, 2.0, 0.0, 0.0, 0.0, True),
        (4.0, 2, 2.0, 1.9, 0.0, 0.0, True),  # (4 + 1.9) / 3 < 2
        (4.0, 2, 2.0, 2.1, 0.0, 0.0, False),
        (4.0, 2, 2.0, 0.0, 0.6, 0.0, True),  # 4 / 3 + 0.6 < 2
        (4.0, 2, 2.0, 0.0, 0.7, 0.0, False),
        (4.0, 2, 2.0, 0.0, 0.0, 1.9, True),  # 1.9 < 2
        (4.0, 2, 2.0, 0.0, 0.2, 1.9, False),
        (4.0, 2, 2.0, 0.5, 0.5, 3.0, True),  # it does not make the step ready earlier, and is back by then
        (4.0, 2, 2.0, 0.5, 0.6, 3.0, False),
        (0.0, 2, 2.0, 0.0, 0.0, 0.0, False),
        (4.0, 0, 2.0, 9.0, 9.0, 0.0, True),
    ],
)
def test_lending_is_worth_it_where_the_step_is_ready_earlier_or_waits_for_something_else(
    left, devices, task, price, back, other, worth
):
    assert worth_lending(left, devices, task, price, back, other) == worth


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["placement={type: adaptive, lend: true}"], "set placement.type to disaggregated"),
        (
            ["placement={type: disaggregated, lend: true}", "rollout.engine=vllm_server"],
            "rollout.engine to transformers",
        ),
        (["placement={type: disaggregated, lend: true}", "train.backend=fsdp"], "set train.backend to replicated"),
    ],
)
def test_lending_that_cannot_be_is_refused_with_the_edit(changes, message):
    with pytest.raises(UserError, match=f"placement.lend: .*{message}"):
        load_recipe(["sums"], ["devices_per_controller=2", *changes])


@pytest.mark.slow
def test_a_run_of_processes_with_a_judge_has_the_same_outcome_with_lent_devices(tmp_path):
    pytest.importorskip("torchvision")
    words = ["train.steps=3", *SMALL[:4], "eval.every=3", "eval.samples=8", "rewards.0.batch_size=4"]
    words += ["sampling.batch_size=4", "train.prompts_per_step=6", "devices_per_controller=3"]
    for lend in ("false", "true"):
        settings = f"placement={{type: disaggregated, lend: {lend}}}"
        runs.run("shapes-judge", tmp_path / lend, *words, settings)
    for mine, theirs in zip(*(runs.rows(tmp_path / lend) for lend in ("false", "true")), strict=True):
        for key in ("reward/mean", "optim/grad_norm", "mismatch/weight_mean", "policy/ratio_max_dev"):
            assert mine[key] == theirs[key], (mine["step"], key)
    for file in ("weights", "optimizer", "ahead"):
        whole = [tmp_path / lend / "checkpoints" / "step_000003" / f"{file}.safetensors" for lend in ("false", "true")]
        assert whole[0].read_bytes() == whole[1].read_bytes()
    lines = runs.placed(tmp_path / "true")
    assert {"train", "rollout"} <= {line["role"] for line in lines if line.get("device") == 0}
    said = [line["decision"] for line in lines if "decision" in line]
    assert len(said) == 3
    assert any(re.match(r"1 device that trains sampled \d+ micro-batch", one) for one in said)
