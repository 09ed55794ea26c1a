"""Three roles on two hosts of one machine: a lent trainer, a device that is killed, and a host at half its speed."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress

import psutil
import pytest

from mmrl.app.verify.decisions import verify_decisions
from mmrl.placement.tasks import LENT
from tests.support import runs
from tests.support.hosts import ENVIRONMENT, lose, network, ray
from tests.support.three_roles import BRIGHT

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.long]  # in short: tests/placement/test_three_roles.py and test_two_hosts.py
SMALL = ["train.steps=5", "train.prompts_per_step=4", "train.group_size=4", "train.micro_batch_size=4"]
SMALL += [
    "sampling.batch_size=4",
    "checkpoint.every=1",
    "eval.every=null",
    "model.dtype=float32",
    "optim.lr=1e-4",
    "rewards.0.batch_size=4",
]


@pytest.fixture(scope="module")
def two():
    """Two hosts with a cluster of three devices each, and its address."""
    short = tempfile.mkdtemp(prefix="ray")
    with network(2) as hosts:
        address = f"{hosts[0].address}:6399"
        try:
            ray(hosts[0], "--head", "--port=6399", "--include-dashboard=false", f"--temp-dir={short}", cpus=3)
            ray(hosts[1], f"--address={address}", cpus=3)
            yield hosts, address
        finally:
            for host in hosts:
                lose(host)
            shutil.rmtree(short, ignore_errors=True)


def actors(host):
    """The run's processes there, the last one started last."""
    found = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True).stdout
    here = []
    for pid in found.split():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if "ray::Actor" in " ".join(process.cmdline()):
                here.append(process)
    return sorted(here, key=lambda process: process.create_time())


@contextmanager
def half_as_fast(host):
    """Every process of the run there stands still half of the time."""
    ends = threading.Event()

    def slow():
        while not ends.wait(0.05):
            stopped = actors(host)
            for which in (signal.SIGSTOP, signal.SIGCONT):
                for process in stopped:
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(which)
                time.sleep(0.05 if which == signal.SIGSTOP else 0.0)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


@pytest.mark.parametrize("recipe", ["sums-capo", "scenes-judge", "scenes-zoom-judge", "shapes-judge", "moving-shapes"])
def test_three_roles_on_two_hosts_learn_as_fixed_roles_on_one(two, tmp_path, recipe):
    hosts, address = two
    small = [*SMALL]
    if recipe == "moving-shapes":  # its own reward is a program, which needs no device
        (tmp_path / "bright.py").write_text(BRIGHT)
        small.append(f'rewards=[{{name: "{tmp_path / "bright.py"}:score", batch_size: 4}}]')
    fixed = "placement={type: disaggregated, trainers: 1, judges: 1}"
    runs.run(recipe, tmp_path / "fixed", *small, "devices_per_controller=3", fixed)
    out, moved = (
        tmp_path / "moved",
        "placement={type: disaggregated, trainers: 1, split: adaptive, lend: true, log: true}",
    )
    words = ["train", recipe, *small, "controllers=2", "devices_per_controller=3", moved, f"ray={address}"]
    process = hosts[0].start(
        [sys.executable, "-m", "mmrl.cli", *words, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )
    try:
        with half_as_fast(hosts[1]):
            runs.wait_for(process, out, 2, timeout=600)
            actors(hosts[1])[-1].kill()  # a device that samples and judges
            said, _ = process.communicate(timeout=1200)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "all controllers start again after step" in said, said
    for mine, theirs in zip(runs.rows(out), runs.rows(tmp_path / "fixed"), strict=True):
        for key in ("reward/mean", "optim/grad_norm", "sampling/stale_steps"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), (mine["step"], key)
    lines = runs.placed(out)
    lent = [line for line in lines if line.get("device") == 0 and line.get("role") in LENT]
    assert lent  # where a trainer waits depends on the hosts' speed
    assert [line["step"] for line in lines if "decision" in line] == [1, 2, 3, 4, 5]
    decisions = verify_decisions(out)
    assert decisions.equal, str(decisions)
    assert [one.decided for one in decisions.replays.values()] == [5, 5]
    print(f"{recipe}: {decisions}, {len(lent)} tasks lent, {[row['optim/grad_norm'] for row in runs.rows(out)]}")
