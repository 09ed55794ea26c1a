"""What a process does is read from outside: controllers that do not answer, and Ray's own processes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import psutil
import pytest

from mmrl.app.resume import same_run
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.logging.rundir import RunDir
from mmrl.runtime import process_probe
from mmrl.runtime.cluster import Cluster, ClusterLostError, Local
from mmrl.runtime.process_probe import Silence, read

HOLD = "import ctypes; ctypes.PyDLL(None).sleep(600)"  # in C, with the lock held
COMPUTE = "while True: pow(3, 100_000)"


@contextmanager
def doing(*command):
    process = subprocess.Popen(command)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def seen(pid, seconds=0.3):
    silence = Silence()
    silence.see(read(pid))
    time.sleep(seconds)
    silence.see(read(pid))
    return silence


def test_a_process_that_computes_is_told_from_one_that_waits_with_the_lock_held_and_from_one_that_is_stopped():
    python = sys.executable, "-I", "-S", "-c"
    with doing(*python, COMPUTE) as busy, doing(*python, HOLD) as holds:
        until(lambda: "computes" in str(seen(busy)))
        until(lambda: "waits for something (sleeping): 0.0 s of CPU time" in str(seen(holds)))
        assert not seen(busy).stopped
        for pid in (busy, holds):
            os.kill(pid, signal.SIGSTOP)
            until(lambda pid=pid: seen(pid, 0).stopped)
            assert str(seen(pid, 0)) == "it is stopped (SIGSTOP)"
            os.kill(pid, signal.SIGCONT)
            until(lambda pid=pid: not seen(pid, 0).stopped)


def test_the_seconds_of_cpu_time_are_counted_from_the_first_reading():
    silence = Silence()
    assert str(silence) == "its state is not known"
    silence.see(None)
    silence.see(process_probe.Reading("running", 100.0, 50.0))
    silence.see(process_probe.Reading("running", 104.5, 55.0))
    silence.see(None)
    assert str(silence) == "it computes: 4.5 s of CPU time in 5 s"
    assert not silence.stopped


def test_a_process_that_is_gone_cannot_be_read():
    with doing("true") as pid:
        pass
    assert read(pid) is None


def test_the_patience_is_a_duration_that_lets_a_minute_pass_by_default():
    recipe = load_recipe(["sums"], []).recipe
    assert 60 < recipe.runtime.patience <= 300
    assert load_recipe(["sums"], ["runtime.patience=3m"]).recipe.runtime.patience == 180
    with pytest.raises(RecipeError, match=r"runtime\.patience"):
        load_recipe(["sums"], ["runtime.patience=long"])


@pytest.mark.parametrize("older", [False, True])
def test_the_patience_may_change_where_a_run_goes_on(older, tmp_path, capsys):
    resolved = load_recipe(["sums"]).resolved()
    if older:  # than the section
        del resolved["runtime"]
    with RunDir.create(tmp_path / "run") as directory:
        directory.resolved.write_text(json.dumps(resolved))
        same_run(directory, load_recipe(["sums"], ["runtime.patience=5m"]))
    assert capsys.readouterr().err == ""


# Ray's own processes


class Ray:
    """What ``Cluster`` calls of Ray where it is lost."""

    ended = False

    def shutdown(self):
        self.ended = True


@contextmanager
def processes(folder, *names):
    """Processes that are called as Ray's are."""
    with ExitStack() as stack:
        found = {}
        for name in names:
            shutil.copy(shutil.which("sleep"), folder / name)
            found[name] = psutil.Process(stack.enter_context(doing(str(folder / name), "600")))
        until(lambda: all(process.name() == name for name, process in found.items()))
        yield found


def lost(cluster):
    cluster._looked = 0.0
    try:
        cluster.check()
    except ClusterLostError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_local_cluster_is_lost_with_either_of_its_processes_and_leaves_none_of_the_others(tmp_path, name):
    with processes(tmp_path, "raylet", "gcs_server", "python", "controller") as own:
        controller = own.pop("controller")
        ray = Ray()
        cluster = Local(ray, own.values())
        cluster.register(controller.pid)
        own["python"].kill()  # of Ray's, but none that it needs
        assert not lost(cluster)
        own[name].kill()
        until(lambda: f"Ray's {name} on this machine" in lost(cluster))
        assert not cluster.usable()
        cluster.close()
        assert ray.ended
        assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in (*own.values(), controller))


def test_a_raylet_that_is_stopped_is_lost_unless_it_goes_on_at_once(tmp_path):
    with processes(tmp_path, "raylet") as own:
        cluster, raylet = Local(Ray(), own.values()), own["raylet"]
        for last in (False, True):
            raylet.suspend()
            until(lambda: raylet.status() == psutil.STATUS_STOPPED)
            assert not lost(cluster)
            if not last:
                raylet.resume()
                until(lambda: raylet.status() != psutil.STATUS_STOPPED)
                assert not lost(cluster)
        assert "is stopped (SIGSTOP)" in lost(cluster)


def test_the_cluster_of_others_is_lost_once_its_gcs_was_away_for_long_enough(monkeypatch):
    monkeypatch.setattr("mmrl.runtime.cluster._AWAY", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        cluster = Cluster(Ray(), {"GCS": address})
        assert not lost(cluster)
        assert cluster.usable()
    assert not lost(cluster)
    with socket.create_server(address):
        assert not lost(cluster)  # it is back
    assert not lost(cluster)
    time.sleep(0.3)
    assert f"Ray's GCS at 127.0.0.1:{address[1]} is gone" in lost(cluster)
