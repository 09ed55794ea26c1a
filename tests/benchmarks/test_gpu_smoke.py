"""``benchmarks/gpu_smoke.py``: it tells checks that hold from those that do not, on the CPU at small sizes."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def smoke():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("gpu_smoke")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def checks(smoke):
    return smoke.checks


def suite(checks, *works):
    """Checks of these functions."""
    return checks.Suite("smoke", "gpu_smoke.py", lambda: [checks.Check(work.__name__, work, 9) for work in works])


@pytest.mark.slow
def test_slices_of_small_models_run_and_the_results_are_written(smoke, tmp_path, capsys):
    words = [
        "--device",
        "cpu",
        "--small",
        "--together",
        "--only",
        "1",
        "11",
        "14",
        "15",
        "18",
        "--out",
        str(tmp_path),
    ]
    assert smoke.main(words) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines() if not line.startswith("/"))
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert {one["number"]: one["status"] for one in found["checks"]} == {
        **{1: "ok", 11: "ok", 14: "ok"},
        15: "skipped",
        18: "ok",
    }
    assert found["device"] == "the CPU"
    assert found["date"]
    assert found["command"]
    assert found["environment"]["versions"]
    assert file.with_suffix(".txt").read_text().count("ok") >= 3


def test_a_check_that_misses_fails_or_takes_too_long_is_told_apart(smoke, checks, tmp_path):
    def missed(place):
        raise checks.MissedError("too large", {"gap": 0.1})

    def failed(place):
        raise RuntimeError("out of memory")

    place, made = checks.Place("cpu", True, tmp_path), suite(checks, missed, failed)
    first, second = (checks.run(made, n, place, together=True) for n in range(2))
    assert (first.status, first.why, first.figures, first.bad) == ("missed", "too large", {"gap": 0.1}, True)
    assert (second.status, second.why, second.bad) == ("failed", "RuntimeError: out of memory", True)
    assert "RuntimeError: out of memory" in checks.table([first, second])


def test_a_run_that_is_stopped_keeps_what_it_has_found(smoke, checks, tmp_path, monkeypatch):
    def one(place):
        return {"found": 7}

    def stopped(place):
        raise KeyboardInterrupt

    monkeypatch.setattr(smoke, "SUITE", suite(checks, one, stopped))
    with pytest.raises(KeyboardInterrupt):
        smoke.main(["--device", "cpu", "--small", "--together", "--out", str(tmp_path)])
    (file,) = tmp_path.glob("*.json")
    assert [one["figures"] for one in json.loads(file.read_text())["checks"]] == [{"found": 7}]
    assert "found 7" in file.with_suffix(".txt").read_text()


@pytest.mark.slow
def test_checks_that_train_run_in_processes_of_their_own(smoke, capsys):
    assert smoke.main(["--device", "cpu", "--small", "--only", "10", "11"]) == 0
    assert capsys.readouterr().out.count(" ok ") == 2


def test_what_cannot_run_is_refused(smoke, capsys):
    assert smoke.main(["--device", "cpu", "--only", "21"]) == 2
    assert "there is no check 21; they are 1 to 20" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert smoke.main([]) == 2
        assert "torch sees no GPU here; give --device cpu --small" in capsys.readouterr().err
