"""The proof of distilled judges, where the students are refused."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.cli import mmrl
from tests.support.distill import JUDGES, RECIPE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def proof():
    """The script, imported as its command imports it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("proof_distill")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def in_process(*words, log, calls, capsys):
    """What ``command`` does, without another process."""
    calls.append(words)
    capsys.readouterr()
    code = mmrl(*words)
    log.write_text(capsys.readouterr().err)
    if code:
        raise subprocess.CalledProcessError(code, words)


@pytest.mark.slow
def test_students_that_are_refused_are_said_and_not_made_again(proof, tmp_path, monkeypatch, capsys):
    tiny.language_model(tmp_path / "tinylm", sharp=0.3)
    (tmp_path / "judges.py").write_text(JUDGES)
    (tmp_path / "odd.yaml").write_text(RECIPE.replace("judges.py:digits", "judges.py:odd"))
    calls = []
    monkeypatch.setattr(proof, "command", lambda *words, log: in_process(*words, log=log, calls=calls, capsys=capsys))
    monkeypatch.chdir(tmp_path)
    given = [
        "--recipe",
        "odd.yaml",
        "--reward",
        "odd",
        "--share",
        "0.4",
        "--steps",
        "10",
        "--backbone",
        "none",
        "--out",
        "out",
    ]
    monkeypatch.setattr(sys, "argv", ["proof_distill", *given, "--arms", "cascade", "refreshed"])
    proof.main()
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    refused = [row for row in said if "refused" in row]
    assert [(row["arm"], row["samples"]) for row in refused] == [("cascade", 64), ("refreshed", 64)]
    assert len(calls) == 1  # both have the same students; no arm is run
    assert all("no student orders held-out samples of a prompt better" in row["refused"] for row in refused)
    proof.main()
    assert len(calls) == 1
    with pytest.raises(subprocess.CalledProcessError):  # another error is not hidden
        proof.distil(["no-such-recipe"], tmp_path / "none", tmp_path / "none.log")
    assert not (tmp_path / "none").exists()


def test_shares_are_of_the_judges_gain_and_of_all_calls(proof):
    rows = [
        {"arm": "judge", "gain": 0.2, "calls": 1000, "distilling": 0},
        {"arm": "judge", "gain": 0.3, "calls": 1000, "distilling": 0},
        {"arm": "cascade", "gain": 0.15, "calls": 90, "distilling": 100},
        {"arm": "cascade", "gain": 0.25, "calls": 110, "distilling": 100},
    ]
    assert proof.ratios(rows) == {"cascade": {"gain": 0.8, "calls": 0.2}}
    assert proof.ratios(rows[2:]) == {}


def test_the_cascade_asks_no_more_than_its_share(proof, tmp_path):
    rows = [{"judge_below": 0.6, "asked": 0.1}, {"judge_below": 0.7, "asked": 0.2}]
    (tmp_path / "distilled.json").write_text(json.dumps({"figures": {"judge_below": rows}}))
    assert [proof.threshold(tmp_path, share) for share in (0.05, 0.1, 0.3)] == [0.0, 0.6, 0.7]
