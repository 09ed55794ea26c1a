"""Rewards that compute outside of the devices, such as a judge behind HTTP, in the placement and in the simulator."""

import inspect
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import mmrl
from mmrl.cli import app
from mmrl.cli.simulate import CONCURRENCY
from mmrl.config.placement import Placement
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.placement.adaptive import Split
from mmrl.placement.multi_device import Outside
from mmrl.placement.simulated_devices import MicroBatch, SimulatedCalls, SimulatedDevices
from mmrl.placement.step_records import as_rows
from mmrl.placement.task_queue import TaskQueue
from mmrl.placement.tasks import Call
from mmrl.placement.what_if import rounds, tried
from mmrl.planner.simulator.simulate import Cluster, adaptive, bound, disaggregated, static
from mmrl.planner.simulator.trace import LOADS, HttpJudge, Trace, Work, synthetic
from mmrl.planner.simulator.trace_from_run import read_run
from mmrl.report.timeline import timeline
from mmrl.rewards.calling import Caller
from mmrl.rewards.loading import build, find
from tests.support import judging
from tests.support.runs import rows, run

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from sleeping_devices import SleepingDevices


def call(seconds, requests=1, at_once=1, reward="judge"):
    return Call(reward, requests, seconds * requests, at_once)


def test_requests_take_turns():
    calls = SimulatedCalls()
    assert calls.answered(call(2.0, requests=10, at_once=4), 0.0) == (0.0, 6.0)  # 4, 4 and 2 of them
    assert calls.answered(call(1.0, requests=3, at_once=4), 1.0) == (4.0, 6.0)  # two turns are free at 4, two at 6
    assert calls.answered(call(1.0, reward="other"), 1.0) == (1.0, 2.0)


@pytest.mark.parametrize(("at_once", "seconds"), [(1, 16.0), (3, 8.0)])
def test_a_phase_ends_with_the_last_answer(at_once, seconds):
    devices = SimulatedDevices(1, 0.0)
    devices.step([[MicroBatch(1.0, 0.0, (call(5.0, at_once=at_once),))] * 3], Split(1, 0), "never")
    assert devices.scheduler.events.done_after("rollout", "judge", "call") == seconds
    assert devices.scheduler.numbers()["scored"] == seconds


def test_another_round_begins_when_all_has_answered():
    devices = SimulatedDevices(2, 0.0)
    asked = MicroBatch(1.0, 2.0, (call(7.0),))
    devices.step([[asked, asked], [MicroBatch(1.0, 0.0)]], Split(1, 1), "never")
    began = [event.began for event in devices.scheduler.events if event.role == "rollout"]
    assert began == [0.0, 1.0, 15.0]  # the second call is answered at 1 + 7 + 7


def test_the_work_of_a_step_has_its_calls_again():
    work = [
        [MicroBatch(2.0, 1.0, (call(4.0, 3, 2),)), MicroBatch(3.0, 1.0, (call(5.0, 3, 2),))],
        [MicroBatch(1.0, 0.5)],
    ]
    devices = SimulatedDevices(2, 0.0)
    devices.step(work, Split(1, 1), "never")
    assert rounds(devices.scheduler.events) == work


def test_candidates_of_the_policy_wait_for_the_answers():
    state = SimpleNamespace(devices=2, inside=True)
    devices = SimulatedDevices(2, 0.0)
    devices.step([[MicroBatch(1.0, 1.0, (call(20.0),))] * 2], Split(1, 1), "never")
    assert min(tried(devices.scheduler, state)) >= 41.0  # whatever the devices do


def test_the_bound_counts_the_judge_s_turns():
    work = Work([[[MicroBatch(1.0, 2.0, (call(3.0, 4, 2),))] * 4]], 5.0)
    assert bound(Trace([work], 0.0, ""), Cluster(1, 8)) == [1.0 + 4 * 4 * 3.0 / 2 + 5.0]
    assert static(Trace([work], 0.0, ""), Cluster(1, 8), Split(8, 0)).steps == [1.0 + 24.0 + 5.0]


def test_faster_requests_gain_nothing_where_the_devices_are_slower():
    slow, fast, none = (
        adaptive(synthetic(LOADS["steady"], 4, 1, 4, 16, asked=asked), Cluster(1, 4)).seconds
        for asked in (HttpJudge(40.0, 8, 4), HttpJudge(0.001, 8, 4), None)
    )
    assert slow > 4 * 16 * 8 * 40 / 4 * 0.9  # the judge's own turns
    assert fast == pytest.approx(none, rel=0.01)
    ahead = disaggregated(synthetic(LOADS["steady"], 4, 1, 4, 16, asked=HttpJudge(40.0, 8, 4)), Cluster(1, 4), 1, 1, 1)
    assert ahead.seconds > 4 * 16 * 8 * 40 / 4 * 0.9


def test_sleeping_devices_wait_for_sleeping_requests_as_the_simulated_ones_do():
    work = [[MicroBatch(0.01, 0.01, (call(0.02, 4, 2),))] * 6]
    simulated = SimulatedDevices(3, 0.0)
    simulated.step(work, Split(2, 1), "never")
    expected = simulated.scheduler.events.done_after("call")
    assert expected == pytest.approx(0.01 + 6 * 4 * 0.02 / 2)
    devices = SleepingDevices(3, Placement(type="partial", judges=1), 0.0)
    try:
        for step in range(10):  # a busy machine may take longer, but not always
            real = devices.run_step(step, work)
            lines = [line for line in devices.lines() if line["role"] == "call"]
            assert real >= expected
            if real < 2 * expected:
                break
    finally:
        devices.close()
    assert real < 2 * expected
    assert [(line["reward"], line["requests"], line["at_once"]) for line in lines] == [("outside", 4, 2)] * 6


def test_devices_that_are_lent_wait_for_requests_too():
    work = [[MicroBatch(0.01, 0.01, (call(0.02, 2, 2),))] * 4]
    settings = Placement(type="disaggregated", trainers=1, judges=1, staleness=1, lend=True, split="adaptive")
    devices = SleepingDevices(3, settings, 0.0)
    try:
        ends = devices.run_ahead([work] * 4, [0.01] * 4, staleness=1)
        lines = list(devices.lines())
    finally:
        devices.close()
    assert ends[-1] >= 4 * 4 * 0.02  # the requests of each micro-batch take both turns
    assert {"call", "train"} <= {line.get("role") for line in lines}
    assert "decision" in lines[-1]


REWARD = """
import asyncio, time
import mmrl

@mmrl.reward(inputs=("text",))
async def counts(samples, *, context):
    await asyncio.sleep(0.03)
    context.asked.requests, context.asked.seconds, context.asked.at_once = 3, 0.05, 4
    return [1.0 for _ in samples]

@mmrl.reward(inputs=("text",))
def slow(samples, *, context):
    time.sleep(0.03)
    return [1.0 for _ in samples]

@mmrl.reward(inputs=("text",))
def quick(samples, *, context):
    return [1.0 for _ in samples]
"""


def recorded(folder, name):
    """The events of two calls of a reward of ``REWARD``."""
    (folder / "own.py").write_text(REWARD)
    board, caller = TaskQueue(1, Placement()), Caller(build(find(f"{folder}/own.py:{name}"), {}), 60.0)
    board.tell(board.scheduler.new_step)
    outside = Outside(board, caller, lambda context: None)
    try:
        for answer in [outside.submit([], Context(label=name)) for _ in range(2)]:
            answer.result()
        time.sleep(0.01)
    finally:
        outside.close()
    return board.scheduler.events


def test_requests_that_a_reward_counts_are_recorded_with_its_call(tmp_path):
    first, second = (event.call for event in recorded(tmp_path, "counts"))
    assert first == second
    assert first == Call("counts", 3, 0.05, 4)


def test_a_reward_that_counts_nothing_makes_one_request_after_another(tmp_path):
    for event in recorded(tmp_path, "slow"):
        assert event.call == Call("slow", 1, pytest.approx(event.ended - event.began, abs=1e-6), 1)
    found = (recorded(tmp_path, "quick") for _ in range(50))  # a busy machine may take longer, but not always
    assert any(not events for events in found)  # it delays nothing


def test_recorded_calls_are_the_work_of_a_trace(tmp_path):
    devices = SimulatedDevices(2, 0.0)
    work = [[MicroBatch(2.0, 1.0, (call(4.0, 3, 2),)), MicroBatch(3.0, 1.0)]]
    devices.step(work, Split(1, 1), "never")
    lines = as_rows(devices.scheduler.events, 1, 0)
    (tmp_path / "placement.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_run(tmp_path)
    assert (found.controllers, found.devices) == (1, 2)
    calls = [batch.calls for batch in found.trace.steps[0].shares[0][0]]
    assert sorted(calls) == [(), (call(4.0, 3, 2),)]
    drawn = timeline(tmp_path / "placement.jsonl")
    assert drawn.bad == 0
    assert drawn.labels == ["device 0", "device 1"]
    with (tmp_path / "placement.jsonl").open("a") as file:
        file.write(json.dumps({**lines[-1], "role": "call", "reward": "judge", "requests": 0}) + "\n")
    with pytest.raises(UserError, match="unexpected format"):
        read_run(tmp_path)


@pytest.mark.slow
def test_a_real_run_is_predicted_from_its_requests(tmp_path):
    said = json.dumps({"choices": [{"message": {"content": "7"}, "finish_reason": "stop"}]})

    def late(handler, body):
        if body is None:
            return False
        time.sleep(0.5)
        handler.say(200, said, "application/json")
        return True

    with judging.Served(before=late) as server:
        model = {"url": server.url, "name": "tiny"}
        options = {
            "model": model,
            "rubric": "{{ response }}",
            "answer": {"type": "number", "min": 0, "max": 10},
            "max_tokens": 4,
        }
        options |= {"concurrency": 4, "cache": False}
        judge = f"rewards={json.dumps([{'name': 'judge', 'batch_size': 4, 'options': options}])}"
        train = [
            "train.steps=3",
            "train.prompts_per_step=8",
            "train.group_size=4",
            "sampling.batch_size=4",
            "train.micro_batch_size=4",
        ]
        run("sums", tmp_path / "run", *train, judge, "devices_per_controller=2", "eval.every=null")
    recorded = read_run(tmp_path / "run")
    calls = [
        c for work in recorded.trace.steps for one in work.shares for batches in one for b in batches for c in b.calls
    ]
    assert [(c.requests, c.at_once) for c in calls] == [(4, 4)] * (3 * 8)
    assert all(c.seconds >= 4 * 0.5 for c in calls)  # at least 0.5 s for each
    predicted = static(recorded.trace, Cluster(1, 2), Split(2, 0)).steps
    took = [row["time/step"] for row in rows(tmp_path / "run")]
    assert all(step >= 8 * 0.5 for step in took)  # eight calls that take all turns
    for step, whole in zip(predicted, took, strict=True):  # a step has more than its calls, and never less
        assert 8 * 0.5 <= step <= 1.15 * whole


def simulated(*words):
    found = CliRunner().invoke(app, ["simulate", "sums", "devices_per_controller=4", "--steps", "2", *words])
    return found.exit_code, f"{found.output} {found.exception}"


HTTP = 'rewards=[{name: judge, options: {model: {url: "http://127.0.0.1:1/v1", name: j}, concurrency: 2}}]'


def test_the_command_line_describes_a_judge_behind_http(tmp_path):
    code, said = simulated()
    assert code == 0
    assert "over HTTP" not in said
    code, untold = simulated(HTTP)
    assert code == 0
    assert "requests over HTTP (judge) take no time here; add --latency SECONDS" in untold
    code, told = simulated(HTTP, "--latency", "500")
    assert code == 0
    assert "over HTTP" not in told
    assert "the devices wait for requests" in told
    assert "the devices wait" not in simulated(HTTP, "--latency", "0.001")[1]
    assert told != untold
    assert told != simulated(HTTP, "--latency", "500", "--concurrency", "200")[1]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--concurrency", "3"], "add --latency SECONDS"),
        (["--latency", "3", "--trace", "."], "a trace has the run's own requests"),
        ([HTTP.replace("concurrency: 2", "concurrency: none"), "--latency", "3"], "write a whole number, 1 or more"),
    ],
)
def test_options_that_say_too_little_are_refused(tmp_path, monkeypatch, words, why):
    row = {"step": 1, "controller": 0, "device": 0, "role": "rollout", "began": 0.0, "ended": 1.0}
    (tmp_path / "placement.jsonl").write_text(json.dumps(row) + "\n")
    code, said = simulated(*[str(tmp_path) if word == "." else word for word in words])
    assert code == 1
    assert why in " ".join(said.split())


def test_a_judge_makes_as_many_requests_at_once_as_the_simulator_assumes():
    assert inspect.signature(mmrl.load("rewards", "judge").Judge).parameters["concurrency"].default == CONCURRENCY
