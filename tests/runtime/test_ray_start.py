"""A Ray that does not start is a message with the edit that mends it; one whose processes are killed is found out, ends
whole, and another takes its place. Nothing is trained here."""

import signal
import subprocess
import time

import psutil
import pytest

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.runtime.cluster import ClusterLostError, cluster

pytest.importorskip("ray")


def local():
    return cluster(load_recipe(["sums"], ["controllers=2"]).recipe)


def children():
    """The processes that this one started, and those that they did. One of an earlier test may end while another test
    runs: what is asked of a test is that it adds none."""
    return {*psutil.Process().children(recursive=True)}


def refused():
    """What is said of a cluster of this machine that does not start."""
    before, handler = children(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError) as error, local():
        pass
    assert signal.getsignal(signal.SIGTERM) is handler
    assert children() <= before
    return str(error.value)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    said = refused()
    assert said.startswith("ray: Ray did not start on this machine ([Errno 20] Not a directory")
    assert f"free space in {tmp_path}/file" in said
    assert "RAY_TMPDIR=/path" in said


def test_ray_is_started_again_on_a_machine_that_was_too_busy(monkeypatch, capfd):
    """What the first start leaves is ended before the second."""
    left = []

    def late(**where):
        left.append(subprocess.Popen(["sleep", "100"]))
        raise Exception("The current node timed out during startup" if len(left) == 1 else "another reason")

    monkeypatch.setattr("ray.init", late)
    assert refused().startswith("ray: Ray did not start on this machine (another reason)")
    assert [process.poll() is None for process in left] == [False, False]
    assert "Ray did not start in time; it is started again (2 of 3)" in capfd.readouterr().err


@pytest.mark.long  # in short: the errors above, which take the same way
@pytest.mark.slow
def test_a_raylet_that_does_not_start_is_told_with_where_its_logs_are(monkeypatch):
    """Ray waits half a minute for it, three times, and raises a bare ``Exception``."""
    monkeypatch.setattr("ray._private.services.RAYLET_EXECUTABLE", "/bin/false")
    said = refused()
    assert said.startswith("ray: Ray did not start on this machine (The current node timed out during startup")
    assert "session_latest/logs" in said


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


@pytest.mark.slow
def test_clusters_that_lose_a_process_are_found_out_and_leave_nothing():
    before, handler = children(), signal.getsignal(signal.SIGTERM)
    for name in ("raylet", "gcs_server"):
        with local() as there:
            assert signal.getsignal(signal.SIGTERM) is handler  # Ray takes it for itself
            assert there.usable()
            next(p for p in psutil.Process().children() if p.name() == name).kill()
            time.sleep(1)
            with pytest.raises(ClusterLostError, match=f"Ray's {name} on this machine"):
                there.check()
        assert until(lambda: children() <= before)
