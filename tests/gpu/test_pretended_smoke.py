"""``benchmarks/gpu_smoke.py`` on the pretended device: it must not fail on a GPU for its own mistakes."""

import importlib
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pretend_cuda
ROOT = Path(__file__).resolve().parents[2]


def test_the_checks_hold_on_a_device_that_refuses_mixed_tensors(tmp_path, monkeypatch, capsys):
    """Those that train are among them, one of each modality. The device counts waits itself, as no profiler sees it."""
    from tests.support import pretend

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["gpu_smoke.py"])
    smoke = importlib.import_module("gpu_smoke")
    waiting = importlib.import_module("smoke_waits")
    monkeypatch.setattr(waiting, "COUNTING", pretend.waits)
    one = "model.offload, a step"  # the others are in tests/gpu/test_pretended_waits.py
    monkeypatch.setattr(waiting, "CASES", {one: waiting.CASES[one]})
    only = ["1", "3", "7", "10", "11", "12", "13", "14", "15", "19"]
    assert smoke.main(["--small", "--together", "--out", str(tmp_path), "--only", *only]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" ok ") == 9
    assert "model.offload, a step 0 of 0" in shown
    assert "peak GiB" in shown


def test_more_waits_than_the_budget_are_missed(tmp_path, monkeypatch):
    from tests.support import pretend

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    waiting, place = (importlib.import_module(name) for name in ("smoke_waits", "smoke_place"))
    one = "a slice of text"
    monkeypatch.setattr(waiting, "COUNTING", pretend.waits)
    monkeypatch.setattr(waiting, "CASES", {one: waiting.CASES[one]})
    monkeypatch.setitem(waiting.BUDGETS, one, waiting.Budget())
    with pytest.raises(place.MissedError, match="more often than the budget says: a slice of text") as missed:
        waiting.waits(place.Place("cuda", True, tmp_path))
    assert missed.value.figures == {one: "1 of 0"}
