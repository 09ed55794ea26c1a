"""Replicas: engines and judges of several devices: how they are counted, planned and refused, and their samples."""

import os
import signal
import time

import psutil
import pytest

from mmrl.config.loader import RecipeError
from mmrl.config.replicas import devices_of_workers, has_replicas, in_workers
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.device_roles import rows
from tests.support import judging, runs
from tests.support.planning import planned_in_short
from tests.support.replicas import EXAMPLE, JUDGE, SHORT, TWO, metrics, recipe


@pytest.mark.parametrize(
    ("words", "workers", "devices"),
    [
        (["devices_per_controller=3", "placement=disaggregated"], 3, [1, 1, 1]),
        (["devices_per_controller=3", "placement=disaggregated", TWO], 2, [1, 2]),
        (["devices_per_controller=6", "placement={type: disaggregated, trainers: 2}", TWO], 4, [1, 1, 2, 2]),
        (
            ["devices_per_controller=14", "placement={type: disaggregated, trainers: 2, judges: 8}", TWO, JUDGE],
            5,
            [1, 1, 2, 2, 8],
        ),
        (["controllers=2", "devices_per_controller=3", "placement=disaggregated", TWO], 2, [1, 2]),
    ],
)
def test_workers_are_devices_that_train_and_replicas(words, workers, devices):
    found = recipe(*words)
    counted = in_workers(found)
    assert counted.devices_per_controller == workers
    assert devices_of_workers(found) == devices
    assert sum(devices) == found.devices_per_controller
    assert has_replicas(found) == (max(devices) > 1)
    trainers, judges = counted.placement.training(workers), counted.placement.judges or 0
    assert [trainers, judges] == [found.placement.training(found.devices_per_controller), devices.count(8)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["devices_per_controller=4", "placement={type: disaggregated, trainers: 1}", TWO],
            r"rollout\.options: an engine takes 2 devices, and 3 of 4 .* sample; set devices_per_controller to 3",
        ),
        (
            ["devices_per_controller=9", "placement={type: disaggregated, trainers: 1, judges: 4}", JUDGE],
            r"placement\.judges: a judge's server takes 8 devices, and 4 of 9 .* judge; set it to 8",
        ),
        (
            ["devices_per_controller=3", "placement={type: disaggregated, lend: true}", TWO],
            r"placement\.lend: a device that trains cannot start a server of several devices",
        ),
        (
            ["devices_per_controller=3", TWO],
            r"an engine takes 2 devices, and 3 of 3 .* set devices_per_controller to 2",
        ),
        (["devices_per_controller=4", "placement=adaptive", TWO], "set placement.type to partial, or to disaggregated"),
        (["devices_per_controller=16", JUDGE], r"set placement to \{type: partial, judges: 8\}"),
        (["devices_per_controller=16", "placement={type: partial, judges: 4}", JUDGE], "4 of 16 .* set it to 8"),
        (["devices_per_controller=16", "placement={type: partial, judges: 9}", TWO], "7 of 16 .* sample; set"),
        (["controllers=2", TWO], "an engine of 2 devices does not fit beside a controller of one"),
    ],
)
def test_replicas_that_do_not_divide_are_refused(words, said):
    with pytest.raises(RecipeError, match=said):
        recipe(*words)


def test_the_plan_draws_replicas():
    """Devices that only train, sampling on replicas of two, a judge on eight devices."""
    words = ["devices_per_controller=28", "placement={type: disaggregated, trainers: 16, judges: 8}"]
    made = planned_in_short("sums", *words, TWO, JUDGE)
    assert rows(made) == [
        ("0 to 15", "wait for samples", "train"),
        ("16 to 19", *["sample 1 step ahead, in replicas of 2 devices"] * 2),
        ("20 to 27", *["judge, in replicas of 8 devices"] * 2),
    ]
    alone = planned_in_short("sums", "controllers=2", JUDGE)
    assert "so that the devices that judge are divided into such servers" in "\n".join(alone.problems)


@pytest.mark.slow
def test_an_engine_of_two_devices_draws_what_one_of_one_draws(tmp_path):
    pytest.importorskip("ray")
    engine = tmp_path / "engine.py"
    engine.write_text(
        EXAMPLE.read_text()
        + """

class Spread(OwnCopy):
    def __init__(self, model, *, max_model_len, tensor_parallel_size=1, dtype="float32", device="cpu"):
        import pathlib
        import ray

        mine = ray.get_runtime_context().get_assigned_resources()
        log = pathlib.Path(__file__).with_name(f"has-{tensor_parallel_size}")
        log.write_text(f"{log.read_text() if log.exists() else ''}{mine['CPU']:g} ")
        super().__init__(model, max_model_len=max_model_len, dtype=dtype, device=device)
"""
    )
    found = []
    for size in (1, 2):
        words = [f"devices_per_controller={1 + 2 * size}", "placement={type: disaggregated, trainers: 1}"]
        options = f"rollout={{engine: '{engine}:Spread', options: {{tensor_parallel_size: {size}}}}}"
        out = tmp_path / f"run-{size}"
        code, said = runs.ended(runs.train("sums", out, *SHORT, *words, options))
        assert code == 0, said
        found.append(metrics(out))
    assert len(found[0]) == 3
    assert found[0] == found[1]
    assert set((tmp_path / "has-1").read_text().split()) == {"1"}
    assert set((tmp_path / "has-2").read_text().split()) == {"2"}


def kill_one(root, name, patience=600):
    """Kill a process called ``name`` below the process ``root``, once it is there."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        for child in psutil.Process(root).children(recursive=True):
            if any(name in word for word in child.cmdline()[:1]):
                os.kill(child.pid, signal.SIGKILL)
                return
        time.sleep(0.5)
    raise AssertionError(f"no process {name}")


@pytest.mark.slow
@pytest.mark.long  # in short: the test above, with an engine in the worker's process
def test_real_vllm_on_two_devices_survives_the_loss_of_one_of_its_processes(tmp_path):
    """Its samples are those of a server on one device, also where one of its two processes is killed, and where weights
    reach both without a file."""
    allow_cpu_only()
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    found = []
    for size, killed in ((1, False), (2, False), (2, True)):
        out = tmp_path / f"run-{size}-{killed}"
        words = [f"devices_per_controller={1 + size}", "placement={type: disaggregated, trainers: 1}"]
        transport = "gloo" if killed else "auto"
        engine = (
            f"rollout={{engine: vllm_server, weight_transport: {transport}, options: {{tensor_parallel_size: {size}}}}}"
        )
        process = runs.train("sums", out, *SHORT, "train.steps=4", "eval.every=null", *words, engine)
        if killed:
            while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
                assert process.poll() is None
                time.sleep(0.5)
            kill_one(process.pid, "VLLM::Worker_TP1")
        code, said = runs.ended(process, timeout=1800)
        assert code == 0, said
        assert ("the rollout engine is started again" in said) == killed, said
        found.append(metrics(out))
    assert len(found[0]) == 4
    for row, other in zip(found[0], found[1], strict=True):  # sums over two devices are in another order
        assert row["reward/mean"] == pytest.approx(other["reward/mean"], abs=0.1)
    assert found[1] == found[2]


@pytest.mark.slow
@pytest.mark.long  # in short: the numbers of workers, above, and the judge on one device of test_judge_remote.py
def test_a_real_judge_on_two_devices_says_what_one_on_one_says(tmp_path):
    allow_cpu_only()
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    pairs = [
        (question, "yes" if n < yes else "no") for question, yes in {"answer: 9": 4, "b": 1}.items() for n in range(5)
    ]
    model = judging.taught(tmp_path / "judge", pairs, 120, within=0.5)
    found = []
    for size in (1, 2):
        placement = f"placement={{type: disaggregated, trainers: 1, judges: {size}}}"
        words = [f"devices_per_controller={2 + size}", placement, "train.steps=2", "eval.every=null"]
        args = f"{{tensor_parallel_size: {size}, dtype: float32}}"
        asked = f"rubric: '{{{{ response }}}}', model: {{vllm: {model}, args: {args}}}"
        judge = f"rewards=[{{name: judge, timeout: 900, options: {{{asked}}}}}]"
        out = tmp_path / f"run-{size}"
        code, said = runs.ended(runs.train("sums", out, *SHORT, *words, judge), timeout=1800)
        assert code == 0, said
        found.append([row["reward/mean"] for row in metrics(out)])
    assert found[1] == pytest.approx(found[0], abs=1e-3)
    assert len({round(value, 4) for value in found[0]}) == 2  # the judge tells samples apart
