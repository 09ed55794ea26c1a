"""``benchmarks/gpu_smoke.py`` on the pretended device: it must not fail on a GPU for its own mistakes."""

import importlib
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pretend_cuda
ROOT = Path(__file__).resolve().parents[1]


def test_the_checks_hold_on_a_device_that_refuses_mixed_tensors(tmp_path, monkeypatch, capsys):
    """Those that train are among them, one of each modality; what the device lacks is skipped."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["gpu_smoke.py"])
    smoke = importlib.import_module("gpu_smoke")
    only = ["1", "3", "7", "10", "11", "12", "13", "14", "15"]
    assert smoke.main(["--small", "--together", "--out", str(tmp_path), "--only", *only]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" ok ") == 7
    assert "torch's profiler does not see this device" in shown
    assert "peak GiB" in shown
