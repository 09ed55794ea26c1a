"""The proof of distilled judges, where the students are refused."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.test_cli import mmrl
from tests.test_distill import JUDGES, RECIPE

ROOT = Path(__file__).resolve().parents[1]


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
    given = ["--recipe", "odd.yaml", "--reward", "odd", "--samples", "160", "--out", "out"]
    monkeypatch.setattr(sys, "argv", ["proof_distill", *given, "--arms", "student", "cascade", "refreshed"])
    proof.main()
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(said) == len(calls) == 1  # no arm is run
    assert "no student orders held-out samples of a prompt better than chance" in said[0]["refused"]
    proof.main()
    assert len(calls) == 1
    with pytest.raises(subprocess.CalledProcessError):  # another error is not hidden
        proof.distil(["no-such-recipe"], tmp_path / "none", tmp_path / "none.log")
    assert not (tmp_path / "none").exists()
