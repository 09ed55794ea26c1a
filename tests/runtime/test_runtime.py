"""Controllers as Ray actors: a recipe runs on two, is stopped, killed, frozen, and goes on with another number."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.support.runs import (
    actors,
    children,
    ended,
    learned,
    lose_one,
    rows,
    start,
    wait_for,
)

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run of a single controller."""
    out = tmp_path_factory.mktemp("controllers") / "one"
    code, said = ended(start(out))
    assert code == 0, said
    return out


def test_two_controllers_learn_as_one(one, tmp_path):
    out = tmp_path / "two"
    code, said = ended(start(out, "controllers=2"))
    assert code == 0, said
    assert "done: 4 steps" in said
    assert "held-out: unhurried" in said  # the leader's lines are shown
    assert learned(out) == learned(one)
    held = [[row["reward/unhurried"] for row in rows(o, "heldout.jsonl")] for o in (one, out)]
    assert held[0] == pytest.approx(held[1], abs=1e-6)
    assert 0.8e6 < rows(out)[-1]["sent/gradients"] / 4 < 0.9e6  # a number for each of the model's 0.83 M weights
    assert rows(out)[-1]["sent/numbers"] < 10_000
    assert not any(key.startswith("sent/") for key in rows(one)[-1])
    assert (out / "report.html").exists()
    assert sorted(p.name for p in (out / "controllers").iterdir()) == ["0.log", "1", "1.log"]
    assert len(json.loads((out / "samples" / "step_000004.json").read_text())["samples"]) == 4  # half of the eight


def test_a_run_goes_on_with_another_number_of_controllers(one, tmp_path):
    out = tmp_path / "moved"
    process = start(out, "controllers=2")
    wait_for(process, out, 1)
    heard = [c.laddr.ip for p in children(process.pid) for c in p.net_connections("tcp") if c.status == "LISTEN"]
    assert len(heard) > 4
    assert set(heard) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    process.send_signal(signal.SIGINT)
    code, said = ended(process)
    assert code == 0, said
    begun = len(rows(out))
    assert ("continue with" in said) == (begun < 4)
    if begun < 4:  # the stop came before the end
        code, said = ended(start(out, "controllers=3", "--resume"))
        assert code == 0, said
        assert f"resuming after step {begun}" in said
    assert learned(out) == learned(one)


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.long), signal.SIGSTOP])
def test_a_controller_that_dies_or_freezes_is_found_and_nothing_is_lost(one, tmp_path, how):
    lose_one(tmp_path / "lost", how, "controllers=2")
    assert learned(tmp_path / "lost") == learned(one)


def test_an_address_that_does_not_answer_is_named(tmp_path):
    code, said = ended(start(tmp_path / "x", "controllers=2", "ray=127.0.0.1:1"))
    assert code == 2
    assert "no usable Ray cluster at '127.0.0.1:1'" in said
    assert "ray=local" in said


def test_what_the_user_must_mend_stops_all(tmp_path):
    (tmp_path / "bad.py").write_text(
        "import mmrl\n\n@mmrl.reward(inputs=('text',))\ndef score(samples, *, context):\n"
        "    if context.step == 1 and any(s.id.slot % 2 for s in samples):\n        raise ValueError('no luck')\n"
        "    return [0.5 * (s.id.sample % 2) for s in samples]\n"
    )
    reward = f'rewards=[{{name: "{tmp_path / "bad.py"}:score"}}]'
    code, said = ended(start(tmp_path / "x", "controllers=2", reward))
    assert code == 2
    assert "no luck" in said, said
    assert "steps up to 1 are saved; fix it, then: mmrl train" in said


@pytest.mark.long
@pytest.mark.slow
def test_each_controller_has_an_engine_of_its_own(tmp_path):
    pytest.importorskip("vllm")
    found = []
    for controllers in (1, 2):
        out = tmp_path / f"{controllers}"
        more = ["rollout={engine: vllm_server}", "train.steps=3", "eval.every=null", "train.prompts_per_step=3"]
        code, said = ended(start(out, *more, f"controllers={controllers}"), timeout=900)
        assert code == 0, said
        found.append(rows(out))
    for row, other in zip(*found, strict=True):
        assert max(row["mismatch/log_prob_gap_max"], other["mismatch/log_prob_gap_max"]) < 1e-4  # weights arrive
        assert other["text/length"] == row["text/length"]
        assert other["optim/grad_norm"] == pytest.approx(row["optim/grad_norm"], rel=1e-3)


LEDGER = """
import json
import os
import time
from pathlib import Path

import mmrl
from mmrl.training import loop

rollout = loop.collect_batch

def kept(run, slots, step, clock, tally):
    batch = rollout(run, slots, step, clock, tally)
    slots = [batch.micro_batches[m].slots[i] for m, i in batch.places[:: run.recipe.train.group_size]]
    trained = [(s.step, s.index, s.attempt, s.prompt.id) for s in slots]
    with Path(__file__).with_name(f"ledger-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps([step, trained]) + "\\n")
    return batch

loop.collect_batch = kept

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    time.sleep(0.1)
    return [float(sum(map(ord, s.prompt.id)) % 3 == 0 and s.id.sample == 0) for s in samples]
"""


def ledger(folder):
    """By step, the (step, slot, attempt, prompt) that stood in each of its slots, whichever process trained on them."""
    found = {}
    for file in folder.glob("ledger-*.jsonl"):
        for line in file.read_text().splitlines():
            step, trained = json.loads(line)
            found.setdefault(step, set()).update(map(tuple, trained))
    return {step: sorted(trained) for step, trained in found.items()}


def begun(folder, *overrides):
    folder.mkdir(exist_ok=True)
    (folder / "ledger.py").write_text(LEDGER)
    reward = f'rewards=[{{name: "{folder / "ledger.py"}:score"}}]'
    more = [reward, "algorithm={type: dapo}", "train.steps=7", "checkpoint.every=2", "eval.every=null"]
    return start(folder / "run", *more, *overrides)


@pytest.mark.slow
def test_no_prompt_is_lost_or_trained_on_twice(tmp_path):
    """Dynamic sampling, killed twice between checkpoints and gone on with by another number of controllers."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, said = ended(begun(whole))
    assert code == 0, said
    for controllers, steps in ((2, 3), (1, 5)):
        process = begun(killed, f"controllers={controllers}", *(["--resume"] if steps > 3 else []))
        wait_for(process, killed / "run", steps)
        controlling, left = actors(process), children(process.pid)
        process.kill()
        process.wait()
        assert not psutil.wait_procs(controlling, timeout=60)[1]
        for other in left:  # of Ray's own
            with contextlib.suppress(psutil.NoSuchProcess):
                other.kill()
    code, said = ended(begun(killed, "controllers=3", "--resume"))
    assert code == 0, said
    kept = ledger(killed)
    assert kept == ledger(whole)
    assert {step: [(s, i) for s, i, *_ in trained] for step, trained in kept.items()} == {
        step: [(step, index) for index in range(4)] for step in range(7)
    }
    assert any(attempt for step in kept.values() for _, _, attempt, _ in step)
    assert learned(killed / "run") == learned(whole / "run")
    sampled = [
        [(row["sampling/groups"], row["sampling/valid_ema"]) for row in rows(f / "run")] for f in (whole, killed)
    ]
    assert sampled[0] == sampled[1]


HOLDS = """
import ctypes
import os
import time
from pathlib import Path

import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    time.sleep(0.4)
    held = Path(__file__).with_suffix(".held")
    if context.step == 1 and os.readlink("/proc/self/fd/1").endswith("/NUMBER.log") and not held.exists():
        held.touch()
        pipe = os.open(Path(__file__).with_suffix(".pipe"), os.O_RDWR)
        ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)  # with the lock held
    return [float(len(sample.text or "") % 2) for sample in samples]
"""


def holding(out, number, *overrides):
    """A run with the scores of ``start``: in controller ``number`` the reward holds the lock in step 2 once, until its
    pipe is written."""
    reward = out.parent / "holds.py"
    reward.write_text(HOLDS.replace("NUMBER", str(number)))
    os.mkfifo(reward.with_suffix(".pipe"))
    return start(out, f'rewards=[{{name: "{reward}:score"}}]', "controllers=2", *overrides)


def held(process, out, timeout=300):
    """The writing end of the pipe that the reward waits for with the lock held, once it does."""
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(OSError):  # nobody reads yet
            return os.open(out.parent / "holds.pipe", os.O_WRONLY | os.O_NONBLOCK)
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)


def heard(process, words, timeout=300):
    """What the run said until it said ``words``."""
    deadline, said = time.monotonic() + timeout, ""
    while words not in said:
        assert time.monotonic() < deadline, said
        assert process.poll() is None, said
        time.sleep(0.1)
        said += process.stdout.read()
    return said


def ray_process(process, name):
    return next(c for c in children(process.pid) if c.name() == name)


def kill_of_ray(process, name):
    """Kill a process of Ray's; returns what the run said until it found that, and all processes that were there."""
    there = children(process.pid)
    ray_process(process, name).kill()
    return heard(process, "a new cluster is started"), there


@pytest.mark.slow
def test_a_reward_that_holds_the_lock_is_waited_for_and_a_killed_raylet_is_replaced(one, tmp_path):
    out = tmp_path / "run"
    process = holding(out, 0)  # which prints what the user sees, and cannot now
    pipe = held(process, out)
    said = heard(process, "no sign of life")  # on a busy machine perhaps before the lock was held, and then no more
    os.write(pipe, b".")
    os.close(pipe)
    wait_for(process, out, 2)
    said += process.stdout.read()
    assert re.search(r"\d of 2 .* has given no sign of life for \d\d+ s; it (waits for something|computes)", said), said
    assert "start again" not in said
    said, before = kill_of_ray(process, "raylet")
    assert "Ray's raylet on this machine" in said
    code, said = ended(process)
    assert code == 0, said
    assert "done: 4 steps" in said
    assert not psutil.wait_procs([p for p in before if p.pid != process.pid], timeout=60)[1]
    assert learned(out) == learned(one)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcs_server", "ray::DashboardAgent"])
def test_any_process_that_ray_needs_may_be_killed(one, tmp_path, name):
    out = tmp_path / "run"
    process = start(out, "controllers=2")
    wait_for(process, out, 1)
    _, before = kill_of_ray(process, name)
    wait_for(process, out, 3)
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert code in (0, 143), said
    assert not psutil.wait_procs(before, timeout=60)[1]
    if code:  # the signal came before the end
        assert "continue with" in said
    assert learned(out) == learned(one)[: len(rows(out))]


@pytest.mark.long
@pytest.mark.slow
def test_patience_has_an_end(one, tmp_path):
    out = tmp_path / "run"
    code, said = ended(holding(out, 1, "runtime.patience=13s"))
    assert code == 0, said
    named = re.findall(r"controller . of 2 .* has given no sign of life for (\d+) s; it waits.*raise runtime", said)
    assert int(named[0]) >= 13
    assert "raise runtime.patience" in said
    assert learned(out) == learned(one)


@pytest.mark.long
@pytest.mark.slow
def test_a_cluster_of_others_that_loses_its_gcs_stops_the_run_which_can_be_resumed(one, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 40)
    monkeypatch.setenv("RAY_worker_niceness", "0")  # of the head's; other work would starve controllers
    out, ray = tmp_path / "run", Path(sys.executable).parent / "ray"
    options = ["--port=6415", "--include-dashboard=false", "--num-cpus=2", "--object-store-memory=100000000"]
    short = tempfile.mkdtemp(prefix="ray")  # the names of its sockets must be short
    log = tmp_path / "ray.log"
    with log.open("w") as file:
        head = subprocess.Popen(
            [ray, "start", "--head", "--block", "--disable-usage-stats", f"--temp-dir={short}", *options], stdout=file
        )
    try:
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        process = start(out, "controllers=2", "ray=127.0.0.1:6415")
        wait_for(process, out, 2)
        next(c for c in children(head.pid) if c.name() == "gcs_server").kill()
        killed = time.monotonic()
        code, said = ended(process)
        assert time.monotonic() - killed < 400  # 20 on a machine that has nothing else to do
    finally:
        for child in children(head.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        head.kill()
        head.wait()
        shutil.rmtree(short, ignore_errors=True)
    assert code == 2, said
    assert "Ray's GCS at" in said
    assert "start Ray again there" in said
    assert "--resume" in said
    code, said = ended(start(out, "controllers=2", "--resume"))
    assert code == 0, said
    assert learned(out) == learned(one)
