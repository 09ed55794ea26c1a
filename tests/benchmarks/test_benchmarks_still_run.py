"""The commands of ``benchmarks/`` that no other test runs: each measures something at its smallest size."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Case(NamedTuple):
    """How a benchmark is run at its smallest."""

    words: str
    """Its arguments."""
    said: str
    """Part of its output, which it prints once it has measured."""
    needs: tuple[str, ...] = ()
    """The packages of extras without which it cannot run."""


CASES = {
    "busy_rows": Case("--rows 4 --samples 10 --shorter 8", "both drew the same 246 tokens"),
    "engine_seeds": Case("--samples 8 --tokens 2 --repeats 1", "without / with: ", ("vllm",)),
    "episode_pace": Case("--loads 1 --samples 4 --repeats 1", "lock step takes "),
    "reward_process": Case("--seconds 0.2 --repeats 1", "in a process "),
    "workload_balance": Case("--prompts 2 --repeats 1", "packed / filled: predicted "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_benchmark_measures_at_its_smallest_size(name, tmp_path):
    case = CASES[name]
    if missing := [package for package in case.needs if importlib.util.find_spec(package) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *case.words.format(folder=tmp_path).split()]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert case.said in done.stdout, done.stdout
