"""A Ray that does not start is a message with the edit that mends it, and leaves no process behind."""

import signal

import psutil
import pytest

from mmrl.config.loader import load_recipe
from mmrl.errors import UserError

pytest.importorskip("ray")


def refused():
    """What is said of a cluster of this machine that does not start."""
    from mmrl.runtime.cluster import cluster

    before, handler = psutil.Process().children(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError) as error, cluster(load_recipe(["sums"], ["controllers=2"]).recipe):
        pass
    assert signal.getsignal(signal.SIGTERM) is handler
    assert psutil.Process().children() == before
    return str(error.value)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    said = refused()
    assert said.startswith("ray: Ray did not start on this machine ([Errno 20] Not a directory")
    assert f"make room in {tmp_path}/file" in said
    assert "RAY_TMPDIR=/path" in said


@pytest.mark.slow
def test_a_raylet_that_does_not_start_is_told_with_where_its_logs_are(monkeypatch):
    """Ray waits half a minute for it and raises a bare ``Exception``."""
    monkeypatch.setattr("ray._private.services.RAYLET_EXECUTABLE", "/bin/false")
    said = refused()
    assert said.startswith("ray: Ray did not start on this machine (The current node timed out during startup")
    assert "session_latest/logs" in said
