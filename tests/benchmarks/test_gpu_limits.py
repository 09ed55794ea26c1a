"""``benchmarks/gpu_limits.py`` and ``gpu_proof.py``: all of it runs at small sizes, and says what was predicted."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support import tiny, tiny_diffusion

ROOT = Path(__file__).resolve().parents[2]


NEED_A_GPU = {"with Liger's loss, ms", "graph, ms", "update, compiled, share", "sampling, compiled, share"}
"""Figures of kernels that are not written at small sizes."""


@pytest.fixture(scope="module")
def limits():
    allow_cpu_only()  # before transformers is imported
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("gpu_limits")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def proof(limits):
    return importlib.import_module("gpu_proof")


@pytest.mark.slow
def test_every_check_runs_at_small_sizes_in_its_own_process(limits, tmp_path, capsys):
    assert limits.main(["--device", "cpu", "--small", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("limits_*.json")
    found = {one["number"]: one for one in json.loads(file.read_text())["checks"]}
    assert [found[n]["status"] for n in (1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13)] == ["ok"] * 11
    assert "--peer PATH" in found[4]["why"]
    assert found[14]["status"] == "ok" or "bitsandbytes" in found[14]["why"]
    for one in found.values():
        if one["status"] == "ok":
            assert one["figures"]["us a launch"] > 0
            assert one["compared"].keys() <= one["figures"].keys() | NEED_A_GPU
    assert found[2]["compared"]["the recipe, ms"] == {"predicted": [505, 505]}  # no ratio of small sizes
    assert "held-out at 2" in found[10]["figures"]
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines() if not line.startswith("/"))


def test_a_figure_stands_beside_its_prediction_and_outlives_its_check(limits, tmp_path):
    checks = limits.checks

    def late(place):
        place.keep({"slice, ms": 100})
        raise RuntimeError("out of memory")

    made = checks.Suite("x", "x.py", lambda: [checks.Check("one", late, 9, {"slice, ms": (40, 60), "other": (1, 2)})])
    one = checks.run(made, 0, checks.Place("cuda", False, tmp_path), together=True)
    assert one.compared == {"slice, ms": {"predicted": [40, 60], "ratio": 2.0}, "other": {"predicted": [1, 2]}}
    shown = checks.table([one])
    assert "slice, ms                                   100  (40 to 60, ratio 2.00)" in shown
    assert one.status == "failed"
    assert one.figures == {"slice, ms": 100}


@pytest.mark.slow
def test_a_check_that_runs_too_long_is_ended(limits, tmp_path, monkeypatch):
    checks = limits.checks
    monkeypatch.setattr(limits, "SUITE", checks.Suite("x", "x.py", too_long))
    assert limits.main(["--device", "cpu", "--small", "--out", str(tmp_path)]) == 1
    (file,) = tmp_path.glob("x_*.json")
    (one,) = json.loads(file.read_text())["checks"]
    assert (one["status"], one["why"]) == ("timeout", "it ran longer than 4 s")  # four times as long as on a card


def too_long():
    return [importlib.import_module("checks").Check("one", never, 1)]


def never(place):
    import threading

    threading.Event().wait()


def test_training_ends_after_its_minutes_also_of_a_run_that_was_resumed(proof, tmp_path):
    rows = [{"step": n, "time/step": 20.0} for n in (1, 2, 3)]  # the last was taken back by the resumption
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = []
    training = SimpleNamespace(directory=tmp_path, step=3, stop=said.append)
    proof.Minutes(1).on_step(training, {"time/step": 19.0})
    assert not said
    proof.Minutes(1).on_step(training, {"time/step": 20.0})
    assert said == ["1 minutes of training"]


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sd35", pytest.param("qwen25-vl", marks=pytest.mark.long)])
def test_a_proof_plans_for_a_gpu_that_is_not_here(proof, job, capsys):
    if job == "qwen25-vl":
        pytest.importorskip("torchvision")
    assert proof.main([job, "--check"]) == 0
    said = capsys.readouterr().out
    assert "GiB at most, by the plan" in said
    assert "steps in 30 minutes" in said, said


@pytest.mark.slow
def test_a_proof_runs_from_end_to_end_on_a_small_checkpoint_of_its_family(proof, tmp_path, capsys):
    words = [
        "device=cpu",
        "threads=1",
        "model.dtype=float32",
        f"model.path={tiny_diffusion.two_blocks()}",
    ]
    clip = tiny.clip(tmp_path / "clip")
    words += [f"rewards=[{{name: pickscore, options: {{path: {clip}, processor: {clip}}}}}]"]
    words += ["sampling.height=32", "sampling.width=32", "sampling.max_sequence_length=8", "eval.samples=8"]
    words += ["train.prompts_per_step=2", "train.group_size=2", "train.steps=2", "eval.every=1", "eval.steps=4"]
    out = tmp_path / "run"
    assert proof.main(["sd35", *words, "--out", str(out), "--results", str(tmp_path / "results")]) == 0
    (file,) = (tmp_path / "results").glob("proof_sd35_*.json")
    found = json.loads(file.read_text())
    assert found["compared with"] == "the untrained model"
    assert list(found["reward/pickscore"]["points"]) == ["0", "1", "2"]
    assert all(low <= value <= high for value, low, high in found["reward/pickscore"]["points"].values())


@pytest.mark.slow
def test_the_proof_of_a_vision_language_model_with_a_judge(proof, tmp_path):
    pytest.importorskip("torchvision")
    policy, judge = (tiny.vision_model(tmp_path / name, "qwen2_5_vl", seed=n) for n, name in enumerate("pj"))
    words = ["device=cpu", "threads=1", "model.dtype=float32", f"model.path={policy}", "model.lora.rank=4"]
    words += [  # of a random judge "yes" and "no" are as unlikely as any token
        'rewards=[{name: judge, options: {model: {path: "'
        + str(judge)
        + '"}, answer: {type: yes_no, floor: 0}, rubric: '
        '"{{ media }}{{ prompt_text }} Is this answer right? {{ response }}"}}]'
    ]
    words += ["sampling.max_new_tokens=4", "eval.samples=8", "train.prompts_per_step=2", "train.group_size=2"]
    words += ["train.steps=2", "eval.every=1", "data.train={size: 20}", "data.heldout={size: 20}"]
    found = proof.trained(proof.JOBS["qwen25-vl"], words, tmp_path / "run", minutes=5)
    assert list(found["reward/exact"]["points"]) == [0, 1, 2]
    assert list(found["reward/judge"]["points"]) == [0, 1, 2]
