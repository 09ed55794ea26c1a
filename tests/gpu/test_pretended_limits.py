"""``benchmarks/gpu_limits.py`` on the pretended device: it must not fail on a GPU for its own mistakes."""

import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.pretend_cuda
ROOT = Path(__file__).resolve().parents[2]


def test_the_checks_hold_on_a_device_that_refuses_mixed_tensors(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    limits = importlib.import_module("gpu_limits")
    only = ["1", "2", "3", "5", "7", "8", "10", "12"]
    assert limits.main(["--small", "--together", "--out", str(tmp_path), "--only", *only]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" ok ") == 7 + (find_spec("triton") is not None)
    assert "peak GiB" in shown
