"""One scheduler: what it decides in a run of real threads it decides in the simulator, and it may be asked anything."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mmrl.config.placement import Placement
from mmrl.placement import adaptive
from mmrl.placement.adaptive import Decision, Split, decide, starting
from mmrl.placement.scheduler import Scheduler
from mmrl.placement.simulated_devices import MicroBatch, SimulatedDevices, SimulatedTask
from mmrl.placement.what_if import tried

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
try:
    from sleeping_devices import Replayed, SleepingDevices
finally:
    sys.path.pop(0)

DEVICES, PRICE = 4, 0.004
PLACEMENTS = [
    {"type": "colocate"},
    {"type": "partial", "judges": 1},
    {"type": "greedy"},
    {"type": "greedy", "judges": 2},
    {"type": "adaptive"},
    {"type": "adaptive", "judges": 2},
    {"type": "adaptive", "inside": False},
]


def work(seed):
    """Two rounds; judging is short in some steps and long in others."""
    rng = random.Random(seed)
    judging = rng.choice((0.004, 0.012))
    return [[MicroBatch(rng.uniform(0.004, 0.016), judging * rng.uniform(0.5, 1.5)) for _ in range(n)] for n in (10, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_replayed_durations_of_a_real_run_give_the_same_decisions(placement):
    settings = Placement(sleep=True, **placement)
    devices, replayed = SleepingDevices(DEVICES, settings, PRICE), Replayed(DEVICES, PRICE, settings=settings)
    state = starting(settings, DEVICES)
    try:
        for step in range(4):
            rounds = work(step)
            assert devices.state.split == state.split
            devices.run_step(step, rounds)
            replayed.replay(devices.record, rounds, state)
            assert replayed.decisions == devices.record.decisions
            assert len(replayed.decisions) >= 2 * 13
            if settings.type == "adaptive":
                state, _ = decide(state, tried(replayed.scheduler, state))
                assert (state.split, state.moves) == (devices.state.split, devices.state.moves)
    finally:
        devices.close()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["fixed", "greedy", "adaptive"])
@pytest.mark.parametrize("lend", [False, True])
def test_disaggregated_decisions_replay_from_the_scheduler_s_log(lend, split):
    settings = Placement(type="disaggregated", trainers=2, judges=1, staleness=1, lend=lend, split=split, log=True)
    devices = SleepingDevices(DEVICES, settings, PRICE)
    try:
        devices.run_ahead([work(step) for step in range(4)], [0.02] * 4, staleness=1)
    finally:
        devices.close()
    roles, handed = logged(devices.written)
    replay = devices.replayed()
    assert replay.differs is None
    assert replay.handed == len(handed)
    assert replay.decided == (4 if split == "adaptive" else 0)
    handed = [(device, roles[number]) for device, number in handed]
    assert sum(role != "train" for _, role in handed) == 4 * 2 * 13
    trainers = {role for device, role in handed if device < 2}
    assert trainers == ({"train", "rollout", "judge"} if lend else {"train"})
    for device in (2, 3):
        found = {role for other, role in handed if other == device} - {"train"}
        assert len(found) == (1 if split == "fixed" else 2)


def logged(lines):
    """The role of each task of a log, and which devices got which tasks."""
    entries = [entry for line in lines for entry in line.get("heard", [])]
    roles = {entry[2]: entry[3] for entry in entries if entry[1] == "ready"}
    return roles, [one for entry in entries if entry[1] == "handed" for one in entry[2]]


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_decisions_replay_from_the_log_and_a_changed_log_is_noticed(placement):
    devices = SleepingDevices(DEVICES, Placement(sleep=True, log=True, **placement), PRICE)
    try:
        for step in range(4):
            devices.run_step(step, work(step))
    finally:
        devices.close()
    replay = devices.replayed()
    assert (replay.differs, replay.step) == (None, 4)
    assert replay.handed == len(logged(devices.written)[1]) >= 4 * 2 * 13
    assert replay.decided == (4 if devices.settings.follows else 0)
    heard = [entry for line in devices.written for entry in line.get("heard", [])]
    swapped = next(entry for entry in reversed(heard) if entry[1] == "handed")
    swapped[2] = [[(device + 1) % DEVICES, number] for device, number in swapped[2]]
    assert "devices got tasks: recorded" in (devices.replayed().differs or "")
    last = next(line["heard"] for line in reversed(devices.written) if "heard" in line)
    del last[next(n for n in reversed(range(len(last))) if last[n][1] == "handed") :]
    assert "devices got tasks: recorded []" in (devices.replayed().differs or "")  # a log that is cut off
    if devices.settings.follows:
        tried = next(entry for entry in heard if entry[1] == "tried")
        tried[2][0] *= 0.5
        assert "seconds under each candidate" in (devices.replayed().differs or "")


def nothing():
    pass


def test_an_idle_device_takes_its_own_task_then_one_of_its_role_then_one_that_is_worth_a_move():
    scheduler = Scheduler(3, lambda: 0.0, Placement())
    for device in (2, 0, 1):
        scheduler.idle(device)
    scheduler.begin(Split(2, 1), "worth", 1)
    own = SimulatedTask("train", 1.0, nothing, device=1)
    sampled, judged = (SimulatedTask(role, 1.0, nothing) for role in ("rollout", "judge"))
    for task in (judged, sampled, own):
        scheduler.ready(task)
    assert scheduler.handed() == [(0, sampled), (1, own), (2, judged)]
    assert scheduler.handed() == []
    another = SimulatedTask("judge", 1.0, nothing)
    scheduler.ready(another)
    scheduler.done(2, "judge", 0.0, 0.0, 1.0)
    scheduler.done(0, "rollout", 0.0, 0.0, 1.0)
    scheduler.idle(0)  # the judge does not ask: the device that has nothing to sample takes its work
    assert scheduler.handed() == [(0, another)]
    assert (scheduler.roles[0], scheduler.moves) == ("judge", 1)


def test_a_task_of_training_without_a_device_is_refused():
    with pytest.raises(ValueError, match="device of its own"):
        Scheduler(1, lambda: 0.0, Placement()).ready(SimulatedTask("train", 1.0, nothing))


def test_the_simulator_takes_no_longer_than_a_run_with_the_same_sleeps():
    settings = Placement(type="partial", judges=2)
    devices, rounds = SleepingDevices(DEVICES, settings, 0.0), [[MicroBatch(0.02, 0.02)] * 8]
    try:
        real = devices.run_step(0, rounds)
    finally:
        devices.close()
    simulated = SimulatedDevices(DEVICES, 0.0)
    simulated.step(rounds, Split(2, 2), "never")
    assert simulated.scheduler.events.done_after("judge") == pytest.approx(0.1)
    assert real >= 0.1


@pytest.mark.parametrize("split", [Split(0, 4), Split(3, 2), Split(4, 0)])
def test_an_impossible_decision_is_refused_and_the_run_goes_on_under_colocate(monkeypatch, split):
    heard = []
    monkeypatch.setattr("mmrl.placement.multi_device.notices.tell", heard.append)
    wrong = Decision(split, "because", {})
    monkeypatch.setattr(adaptive, "decide", lambda state, tried: (replace(state, split=split, moves="never"), wrong))
    devices, rounds = SleepingDevices(DEVICES, Placement(type="adaptive"), 0.0), [[MicroBatch(0.002, 0.002)] * 8]
    try:
        devices.run_step(0, rounds)
        assert [line["rollout"] for line in devices.lines() if "decision" in line] == [DEVICES]
        assert devices.run_step(1, rounds) > 0
    finally:
        devices.close()
    assert devices.settings.type == "colocate"
    assert len(heard) == 1
    assert "goes on under colocate" in heard[0]
