"""The commands of ``benchmarks/`` that no other test runs: each measures something at its smallest size."""

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import mmrl
from mmrl.core.trajectory import Sample, SampleId

ROOT = Path(__file__).resolve().parents[2]


class Case(NamedTuple):
    """How a benchmark is run at its smallest."""

    words: str
    """Its arguments, as a shell takes them; ``{folder}`` is an empty one, ``{root}`` that of the repository."""
    said: str
    """Part of its output, which it prints once it has measured."""
    needs: tuple[str, ...] = ()
    """The packages of extras without which it cannot run."""


CASES = {
    "busy_rows": Case("--rows 4 --samples 10 --shorter 8", "both drew the same "),
    "controller_bytes": Case("--pixels 32 --controllers 1 --arms ours", "our own processor time "),
    "engine_seeds": Case("--samples 8 --tokens 2 --repeats 1", "without / with: ", ("vllm",)),
    "episode_pace": Case("--loads 1 --samples 4 --repeats 1", "lock step takes "),
    "exported_answers": Case(
        "{root}/pipelines/llm/models/sums-qwen3 Compute --tokens 4", "1 of 1 answers have the same tokens", ("vllm",)
    ),
    "judge_agreement": Case("--recipe scenes-judge --samples 8", '"judged": 8', ("torchvision",)),
    "loading_memory": Case("--ranks 1 --layers 1", "    1 rows   "),
    "plan_pairs": Case("--only 15 --measured {root}/benchmarks/results/plan_pairs.json", " of 1 inside"),
    "proof_labels": Case(
        "--cache {folder} --json {folder}/found.json --arms oracle --seeds 0 --samples 12 --steps 1 --heldout 4",
        "| oracle | mean |",
    ),
    "proof_text": Case(
        "--seeds 0 --jobs 1 --samples 8 --out {folder} train.steps=1 train.prompts_per_step=2 train.group_size=2 "
        "eval.samples=8",
        "95 % intervals after RL, greedy, 8 held-out answers",
    ),
    "proof_world": Case(
        "--recipe guess-number --seeds 0 --out {folder}/world train.steps=1 train.prompts_per_step=2 "
        "train.group_size=2 eval.samples=8",
        "| 1 | ",
        ("textarena",),
    ),
    "reward_process": Case("--seconds 0.2 --repeats 1", "in a process "),
    "scheduler_agreement": Case(
        "--loads steady --placements adaptive 'disaggregated, lent' --steps 1 --seconds 0.05", "| all | 2 steps |"
    ),
    "stacked_steps": Case(
        "shapes-full sampling.steps=4 train.prompts_per_step=1 train.group_size=2 train.micro_batch_size=2 --repeats 1",
        "2 a forward: ",
    ),
    "startup": Case("--repeats 1 --only 'mmrl train shapes-full train.steps=1'", "first step"),
    "turn_credit": Case("--out {folder} --seeds 1 --steps 1 --arms 'credit: turn'", "credit: turn 1 ["),
    "workload_balance": Case("--prompts 2 --repeats 1", "packed / filled: predicted "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_benchmark_measures_at_its_smallest_size(name, tmp_path):
    case = CASES[name]
    if missing := [package for package in case.needs if importlib.util.find_spec(package) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    given = shlex.split(case.words.format(folder=tmp_path, root=ROOT))
    words = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *given]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert case.said in done.stdout, done.stdout


def test_the_reward_of_steps_counts_the_finished_ones_that_are_wrong():
    score, sums = mmrl.load("rewards", f"{ROOT}/benchmarks/sum_steps.py:score"), mmrl.load("datasets", "sums")
    prompt = sums.prompts("train")[0]
    steps = prompt.meta["steps"]
    texts = ["", sums.BREAK.join(["1", "2", "3"]), sums.BREAK.join([steps[0], "2"]), sums.BREAK.join([*steps, "1"])]
    samples = [Sample(prompt, SampleId(0, 0, 0, n), text=text) for n, text in enumerate(texts)]
    assert score(samples, context=None) == [0.0, -2.0, 0.0, 0.0]
