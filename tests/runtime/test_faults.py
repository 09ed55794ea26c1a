"""What is found when a run does not get on, and what the run does then."""

import re
import subprocess
import sys

import pytest

from mmrl.core import notices
from mmrl.runtime import stall_watchdog as pulses
from mmrl.runtime.stall_watchdog import Sign, StallWatchdog, Stuck, blamed
from tests.support.runs import SMALL, ended, learned, rows, train

HANGS = """
import os, time
import mmrl, torch

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    if context.step == 4 and not os.path.exists({mark!r}) and any(s.id.slot % 2 for s in samples):
        with open({mark!r}, "w") as file:
            file.write(str(context.folder))
        step = torch.optim.AdamW.step
        torch.optim.AdamW.step = lambda self, *a, **k: time.sleep(600) or step(self, *a, **k)
    return [float(len(sample.text or "") % 2) for sample in samples]
"""


class Time:
    now = 100.0

    def monotonic(self):
        return self.now


def test_a_phase_is_stuck_after_ten_times_its_usual_time(monkeypatch):
    clock = Time()
    for module in (pulses, notices):
        monkeypatch.setattr(module, "time", clock)
    pulse = StallWatchdog(10.0, {"reward": 100.0})
    for phase, seconds in (("train", 2.0), ("reward", 2.0), ("sample", 0.1)):
        for _ in range(3):
            with pulse(phase):
                assert pulse.stuck() is None
                clock.now += seconds
    for phase, still, stuck in (("train", 19.9, 20.1), ("reward", 99.9, 100.1), ("sample", 9.9, 10.1)):
        with pulse(phase):
            clock.now += still
            assert pulse.stuck() is None
            clock.now += stuck - still
            found = pulse.stuck()
            assert (found.phase, found.seconds) == (phase, pytest.approx(stuck))
            assert not pulse.sign({}).waits
            with pulse.waiting():
                assert pulse.sign({}).waits
    assert pulse.stuck() is None


MANY_THREADS = """
import faulthandler, os, threading, time
from mmrl.runtime.stall_watchdog import _place

faulthandler.dump_traceback_later(60, exit=True)
for _ in range(800):
    threading.Thread(target=threading.Event().wait, daemon=True).start()

class Slow:
    def __del__(self):
        time.sleep(0.01)

def more():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

threading.Thread(target=more, daemon=True).start()
for _ in range(5):
    cycle = Slow()
    cycle.itself = cycle
    del cycle
    assert _place(threading.get_ident())
os._exit(0)
"""


def test_where_a_thread_is_is_seen_beside_many_threads_and_garbage():
    """Python 3.11 made frames with a lock held for which the finaliser of garbage then waited."""
    done = subprocess.run([sys.executable, "-c", MANY_THREADS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_phase_that_nobody_knows_is_stuck_once_nothing_shows_progress(monkeypatch):
    clock, at_work = Time(), []
    for module in (pulses, notices):
        monkeypatch.setattr(module, "time", clock)
    pulse = StallWatchdog(10.0, {"reward": 300.0}, patience=100.0, works=lambda thread: bool(at_work))
    with pulse("load"):
        clock.now += 99.9
        assert pulse.stuck() is None
        clock.now += 0.2
        assert str(pulse.stuck()).startswith("load has shown no progress for 100 s (runtime.patience); it is in ")
        pulse.alive()
        clock.now += 99.9
        assert pulse.stuck() is None
        at_work.append(1)  # it computes, reads or writes
        for _ in range(9):
            clock.now += 99.9
            assert pulse.stuck() is None
        at_work.clear()
        with pulse.waiting():
            clock.now += 100.1
            assert pulse.stuck() is not None
        with pulse("sample"):
            assert pulse.stuck() is None
        clock.now += 99.9  # the phase within has ended: that is progress of the one around it
        assert pulse.stuck() is None
        with pulse("reward"):  # rewards have deadlines of their own
            clock.now += 299.9
            assert pulse.stuck() is None
        at_work.append(1)
        found = [clock.now for _ in range(30) if [setattr(clock, "now", clock.now + 50.0)] and pulse.stuck()]
        assert found[0] == pytest.approx(found[-1] - 50.0 * (len(found) - 1))  # one that only computes has an end, too
        assert len(found) == pytest.approx(30 - 22, abs=1)
    for _ in range(4):  # how long it took to load says nothing about the next time
        with pulse("load"):
            clock.now += 0.1
    at_work.clear()
    with pulse("load"):
        clock.now += 99.9
        assert pulse.stuck() is None


STUCK = Stuck("train", 100.0, 0.0)


def test_the_one_that_waits_for_nobody_is_blamed():
    def sign(begun, *, stuck=True, busy=True, waits=False):
        return Sign(STUCK if stuck else None, busy, waits, begun)

    ahead, behind = {"0 cpu": 5, "1 cpu": 2}, {"0 cpu": 4, "1 cpu": 2}
    assert blamed({0: sign(ahead), 1: sign(behind)}) == [1]
    assert blamed({0: sign(behind), 1: sign(ahead)}) == [0]
    assert blamed({0: sign(ahead), 1: sign(behind, stuck=False)}) == []  # it is slow, and gets on
    assert blamed({0: sign(behind), 1: sign(behind)}) == [0, 1]
    assert blamed({0: sign(behind, waits=True), 1: sign(behind, waits=True)}) == [0, 1]  # the network hangs
    assert blamed({0: sign(behind, waits=True), 1: sign(behind, waits=True, stuck=False)}) == []
    assert blamed({0: sign(ahead), 1: sign(behind), 2: sign({"2 cpu": 1}, stuck=False)}) == [1]
    assert blamed({0: sign({}, stuck=False), 1: sign({}, busy=False, stuck=False)}) == []


def test_a_controller_that_waits_for_its_device_is_not_blamed():
    def workers(place):
        return [p for p in ((0, 1), (1, 1)) if p[0] == place[0] and place[1] == 0]

    on, off = Sign(STUCK, True, False, {"0 cpu": 1}), Sign(None, False, False, {"0 cpu": 1})
    slow = Sign(None, True, False, {"0 cpu": 1})
    assert blamed({(0, 0): on, (0, 1): on, (1, 0): slow, (1, 1): off}, workers) == [(0, 1)]
    assert blamed({(0, 0): on, (0, 1): slow, (1, 0): slow, (1, 1): off}, workers) == []
    assert blamed({(0, 0): on, (0, 1): off, (1, 0): slow, (1, 1): off}, workers) == [(0, 0)]
    waiting = Sign(STUCK, True, False, {"0 cpu": 2})  # the device is in a sum that the controller's own thread lacks
    assert blamed({(0, 0): on, (0, 1): waiting, (1, 0): slow, (1, 1): off}, workers) == [(0, 0)]


def test_a_wait_for_work_behind_other_phases_is_measured_by_all_of_them(monkeypatch):
    clock = Time()
    for module in (pulses, notices):
        monkeypatch.setattr(module, "time", clock)
    pulse = StallWatchdog(10.0, hidden=("sample",))
    for phase, seconds in (("train", 5.0), ("sample", 0.0)):
        for _ in range(3):
            with pulse(phase):
                clock.now += seconds
    with pulse("sample"):
        clock.now += 49.9
        assert pulse.stuck() is None
        clock.now += 0.2
        found = pulse.stuck()
    assert (found.phase, found.usual) == ("sample", pytest.approx(5.0))


def test_what_is_started_meanwhile_is_no_time_of_the_phase(monkeypatch):
    clock = Time()
    for module in (pulses, notices):
        monkeypatch.setattr(module, "time", clock)
    pulse = StallWatchdog(10.0)
    for starts in (0.0, 60.0, 0.0):
        with pulse("sample"):
            clock.now += 1.0
            with pulse.starting(), pulse.starting():
                clock.now += starts
    with pulse("sample"):
        with pulse.starting():
            clock.now += 60.0
            assert pulse.stuck() is None
        clock.now += 9.9
        assert pulse.stuck() is None
        clock.now += 0.2
        found = pulse.stuck()
    assert (found.seconds, found.usual) == (pytest.approx(10.1), pytest.approx(1.0))


@pytest.mark.long  # in short: the times after which a phase is stuck, above
@pytest.mark.slow
def test_a_controller_that_gets_nowhere_is_named_and_the_run_goes_on(tmp_path):
    pytest.importorskip("ray")
    file = tmp_path / "hangs.py"
    file.write_text(HANGS.format(mark=str(tmp_path / "mark")))
    words = [*SMALL, "train.steps=6", f'rewards=[{{name: "{file}:score"}}]', "controllers=2"]
    out = tmp_path / "hangs"
    code, said = ended(train("sums", out, *words))
    assert code == 0, said
    named = re.search(
        r"controller (\d) of 2 \(.*\) makes no progress: train has taken (\d+) s, and usually takes", said
    )
    assert named, said
    assert named[1] == ("1" if (tmp_path / "mark").read_text().endswith("controllers/1") else "0")
    assert int(named[2]) >= 10
    assert "all controllers start again after step 4" in said
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4, 5, 6]
    whole = tmp_path / "whole"
    assert ended(train("sums", whole, *words))[0] == 0  # the mark is there now, and nothing hangs
    assert learned(out) == learned(whole)
