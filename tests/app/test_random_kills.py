"""The short form of ``benchmarks/random_kills.py``: runs that are killed at random moments end as one never killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def command(folder, *words):
    # forks of a process with several threads may wait for ever
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(ROOT / "benchmarks" / "random_kills.py"), "--folder", str(folder), *words]
    return subprocess.run(words, capture_output=True, text=True, timeout=540, cwd=ROOT, env=env)


@pytest.mark.slow
def test_five_kills_are_exact_continuations_and_a_difference_is_named(tmp_path):
    words = ["--steps", "7", "--seed", "1"]
    done = command(tmp_path, "--kills", "2", *words)  # stopped here, and goes on with the same command
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "state.json").read_text())["kills"]) == 2
    whole = tmp_path / "whole" / "metrics.jsonl"
    *rows, last = whole.read_text().splitlines()
    last = json.dumps({**json.loads(last), "policy/loss": 1.0})
    whole.write_text("\n".join([*rows, last, ""]))
    done = command(tmp_path, "--kills", "5", *words)
    state = json.loads((tmp_path / "state.json").read_text())
    assert len(state["kills"]) == 5
    assert any(kill["in_save"] for kill in state["kills"]), state["kills"]
    assert done.returncode == 1, done.stderr
    found = {fault for one in [*state["kills"], *state["runs"]] for fault in one["faults"]}
    assert found == {"metrics.jsonl, step 7: policy/loss differ"}
