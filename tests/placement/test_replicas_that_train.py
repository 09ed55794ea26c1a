"""Engines and judges of several devices that also train: who starts a server, what the others do meanwhile."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mmrl.config.placement import Placement
from mmrl.config.replicas import devices_of_workers, leaders
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.placement.simulated_devices import MicroBatch
from mmrl.planner.device_roles import rows, shares
from mmrl.planner.fit_check import edits
from tests.support import judging, runs
from tests.support.planning import planned, planned_in_short
from tests.support.replicas import EXAMPLE as OWN
from tests.support.replicas import JUDGE, MODEL, SHORT, TWO, metrics, recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
try:
    from sleeping_devices import SleepingDevices
finally:
    sys.path.pop(0)

ENGINE = """

class Spread(OwnCopy):
    def __init__(self, model, *, max_model_len, tensor_parallel_size=1, dtype="float32", device="cpu"):
        import os
        import pathlib

        pathlib.Path(__file__).with_name(f"started-{tensor_parallel_size}-{os.getpid()}").touch()
        super().__init__(model, max_model_len=max_model_len, dtype=dtype, device=device)
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["devices_per_controller=4"], {}),
        (["devices_per_controller=4", TWO], {0: 2, 2: 2}),
        (["devices_per_controller=3", "placement=disaggregated", TWO], {}),
        (["devices_per_controller=4", "placement={type: partial, judges: 2}", TWO], {0: 2, 2: 1, 3: 1}),
        (["devices_per_controller=10", "placement={type: partial, judges: 8}", JUDGE], {0: 1, 1: 1, 2: 8}),
    ],
)
def test_devices_that_also_train_have_leaders(words, found):
    assert leaders(recipe(*words)) == found
    assert devices_of_workers(recipe(*words)) == [1] * recipe(*words).devices_per_controller or not found


def test_the_plan_draws_devices_that_sample_judge_and_train():
    """The sources' own example: 16 devices train; before, 8 sample in replicas of two, and 8 are one judge."""
    words = ["devices_per_controller=16", "placement={type: partial, judges: 8, sleep: true}"]
    made = planned_in_short("sums", *words, TWO, JUDGE)
    assert rows(made) == [
        ("0 to 7", "sample, in replicas of 2 devices; judge asleep", "train; judge, engine asleep"),
        ("8 to 15", "judge, in replicas of 8 devices; engine asleep", "train; judge, engine asleep"),
    ]
    assert "sampling micro-batches on 4" in shares(made)
    assert made.problems[-1:] == ["the step is left out"]  # before it, where vLLM is not installed
    judged = f"rewards=[{{name: judge, options: {{rubric: '{{{{ response }}}}', model: {MODEL}}}}}]"
    beside = planned_in_short("sums", "devices_per_controller=4", TWO, judged)
    assert "with colocate every device samples and then judges (judge)" in "\n".join(beside.problems)


def test_the_plan_gathers_all_weights_only_where_no_engine_samples():
    """An engine on several devices lets a model train whose weights fit none."""
    words = ["devices_per_controller=2", "train.backend=fsdp", "train.prompts_per_step=4", "device=cpu"]
    alone, engine = planned("sums", *words), planned("sums", *words, TWO)
    own, sent = (next(phase for phase in made.phases if phase.name == "sample") for made in (alone, engine))
    whole = own.parts["weights gathered for the phase"]
    assert whole > 4 * sent.parts["a tensor being gathered"] > 0
    assert "weights gathered for the phase" not in sent.parts
    said = " ".join(edits(replace(alone, device_memory=whole - 1), own))
    assert "a model whose whole weights" in said
    assert "unless an engine on several devices samples (rollout.options.tensor_parallel_size)" in said
    assert "sampling.batch_size=" not in said


@pytest.mark.parametrize(
    ("placement", "asked"),
    [(Placement(sleep=True), {0, 2, 4, 6}), (Placement(type="partial", judges=4, sleep=True), {0, 2, 4})],
)
def test_the_members_of_a_replica_get_no_work_but_training(placement, asked):
    """All its devices count as busy; they free memory before its server wakes, and it sleeps before any of them
    trains."""
    led = {0: 2, 2: 2, 4: 2, 6: 2} if placement.type == "colocate" else {0: 2, 2: 2, 4: 4}
    devices = SleepingDevices(8, placement, 0.01, led)
    devices.context.recipe.rollout.in_process = False
    try:
        devices.run_step(0, [[MicroBatch(0.01, 0.01 * (placement.type == "partial"))] * 12])
        events = [event for event in devices._board.scheduler.events if event.role in ("rollout", "judge")]
        done, row = devices.performed, devices.end_step(devices.context, 0)
    finally:
        devices.close()
    assert {event.device for event in events} == asked
    freed, applied = ([n for n, (_, name, _) in enumerate(done) if name == what] for what in ("free", "apply"))
    assert {done[n][0] for n in freed} == set(range(8)) - asked
    assert len(applied) == 8
    turned = {role: [n for n, (_, _, to) in enumerate(done) if to == role] for role in ("rollout", "judge", "train")}
    assert {done[n][0] for n in turned["train"]} == asked
    assert max(turned["train"]) < min(applied)
    assert max(freed) < min(turned["rollout"] + turned["judge"])
    for role, size in (("rollout", 2), ("judge", 4)):
        alone = sum(event.ended - event.began for event in events if event.role == role)
        assert row[f"placement/{role}_busy"] == pytest.approx(size * alone)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("replicated", marks=pytest.mark.long), "fsdp"])
def test_samples_and_gradients_are_those_of_engines_on_one_device(tmp_path, backend):
    """Four devices train; their engines have one device each, or two. With weights in shards the members take part in
    sending them."""
    found = []
    for size in (1, 2):
        engine = tmp_path / str(size) / "engine.py"
        engine.parent.mkdir()
        engine.write_text(OWN.read_text() + ENGINE)
        words = ["devices_per_controller=4", f"train.backend={backend}"]
        options = f"rollout={{engine: '{engine}:Spread', options: {{tensor_parallel_size: {size}}}}}"
        out = tmp_path / f"run-{size}"
        runs.run("sums", out, *SHORT, "eval.every=null", *words, options)
        found.append(metrics(out))
        started = len(list(engine.parent.glob("started-*")))  # an engine without a micro-batch does not start
        assert started == 4 // size if backend == "fsdp" else 0 < started <= 4 // size
    assert len(found[0]) == 3
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.long  # in short: the test above, and the judge on one device of tests/rewards/test_judge_remote.py
def test_real_vllm_servers_on_two_devices_sample_and_judge_before_all_four_train(tmp_path):
    allow_cpu_only()
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    model = judging.taught(tmp_path / "judge", [("answer: 9", "yes"), ("b", "no")], 60, within=0.5)
    asked = f"rubric: '{{{{ response }}}}', model: {{vllm: {model}, args: {{tensor_parallel_size: 2, dtype: float32}}}}"
    judge = f"rewards=[{{name: judge, timeout: 900, options: {{{asked}}}}}]"
    words = ["devices_per_controller=4", "placement={type: partial, judges: 2, sleep: true}", "train.steps=2"]
    out = tmp_path / "run"
    process = runs.train("sums", out, *SHORT, "eval.every=null", *words, TWO, judge)
    code, said = runs.ended(process, timeout=1800)
    assert code == 0, said
    found = metrics(out)
    assert len(found) == 2
    assert all(row["optim/grad_norm"] > 0 for row in found)
    lines = [json.loads(line) for line in (out / "placement.jsonl").read_text().splitlines()]
    did = {(line["device"], line["role"]) for line in lines if line.get("role") in ("rollout", "judge", "train")}
    assert did == {(0, "rollout"), (2, "judge"), *((device, "train") for device in range(4))}
