"""Callbacks of a run with several controllers: the leader calls copies of them, with figures of all."""

import json
import os
import subprocess
import sys
import threading

import pytest

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.core.signals import Stop
from mmrl.runtime.actor import packed, unpacked
from mmrl.training.callbacks import Callbacks
from tests.support.runs import ROOT

BESIDE = """
import os, mmrl

class Watch(mmrl.Callback):
    def __init__(self, path):
        self.path, self.steps = path, 0

    def on_step(self, training, metrics):
        self.steps += 1
        training.log(doubled=2 * metrics["reward/mean"], steps=self.steps)
        self.tell(f"step {training.step}")

    def on_evaluation(self, training, metrics):
        self.tell(f"evaluation {training.step}")

    def on_checkpoint(self, training, checkpoint):
        assert (checkpoint / "manifest.json").is_file()
        self.tell(f"checkpoint {checkpoint.name}")

    def on_end(self, training):
        self.tell(f"end {training.step}")

    def tell(self, line):
        with open(self.path, "a") as file:
            print(line, os.getpid() == PARENT, file=file)

PARENT = int(os.environ["PARENT"])
"""
SCRIPT = """
import json, os, sys, threading
os.environ["PARENT"] = str(os.getpid())
import mmrl
from beside import Watch

small = {"train": {"steps": 4, "prompts_per_step": 4, "group_size": 4, "micro_batch_size": 4}, "eval.every": 2,
         "eval.samples": 8, "checkpoint.every": 1}
last = 2

def stop(training, metrics):
    if training.step == last:
        training.stop("enough")

def trained(name, n, *callbacks, **more):
    calls = [Watch(f"{name}.txt"), *callbacks]
    run = mmrl.train("sums", small | {"controllers": n}, callbacks=calls, out=name, quiet=True, **more)
    return {"status": run.status, "metrics": run.metrics, "mine": calls[0].steps}

class Locked(mmrl.Callback):
    def __init__(self):
        self.lock = threading.Lock()

found = {"one": trained("one", 1, stop, Locked()), "two": trained("two", 2, stop)}

def breaks(training, metrics):
    raise KeyError("oops")

try:
    trained("two", 2, breaks, resume=True)
except mmrl.UserError as error:
    found["broken"] = str(error)
try:
    trained("locked", 2, Locked())
except mmrl.UserError as error:
    found["locked"] = str(error)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_leader_of_two_controllers_calls_callbacks_as_a_single_process_does(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "held-out:" not in done.stderr, "it is to be quiet, and the leader's log is not shown"
    found = json.loads(done.stdout.splitlines()[-1])
    one, two = found["one"], found["two"]
    assert one["status"] == two["status"] == "stopped at step 2: enough"
    assert two["metrics"]["reward/mean"] == pytest.approx(one["metrics"]["reward/mean"], abs=1e-6)
    assert two["metrics"]["callback/doubled"] == [2 * value for value in two["metrics"]["reward/mean"]]
    assert two["metrics"]["callback/steps"] == [1, 2]
    assert (one["mine"], two["mine"]) == (2, 0), "of two controllers it is a copy that counts"
    lines = {name: (tmp_path / f"{name}.txt").read_text().splitlines() for name in ("one", "two")}
    told = {name: [line.rsplit(" ", 1) for line in of] for name, of in lines.items()}
    assert sorted(line for line, _ in told["two"][: len(told["one"])]) == sorted(line for line, _ in told["one"])
    assert {here for _, here in told["one"]} == {"True"}
    assert {here for _, here in told["two"]} == {"False"}
    assert "the callback breaks (on_step) raised KeyError" in found["broken"]
    assert "script.py" in found["broken"]
    assert "steps up to 3 are saved" in found["broken"]
    assert "Locked cannot be copied" in found["locked"]
    assert "or set controllers=1 devices_per_controller=1" in found["locked"], "which is what the run named one has"


def test_a_callback_that_cannot_be_copied_is_named(tmp_path):
    cloudpickle = pytest.importorskip("ray").cloudpickle

    class Locked(mmrl.Callback):
        def __init__(self):
            self.lock = threading.Lock()

    with pytest.raises(mmrl.UserError, match=r"Locked cannot be copied .*open files and connections in its first call"):
        packed([Locked()], cloudpickle.dumps)
    in_this_process = Callbacks([Locked()], load_recipe(["sums"], []).recipe, tmp_path, Stop())
    assert in_this_process.step(1, {}) == {}, "a run of one controller and device copies nothing"
    held = 3
    (function,) = unpacked(packed([lambda training, metrics: metrics["a"] + held], cloudpickle.dumps))
    assert function(None, {"a": 4}) == 7
    assert unpacked(packed([], cloudpickle.dumps)) == ()
    with pytest.raises(mmrl.UserError, match="cannot load them"):
        unpacked(b"cnot_there\nThing\n.")
