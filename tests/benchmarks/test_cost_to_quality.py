"""The cost to a quality: what counts as reached, the search, and the table of runs that a file has."""

import argparse
import importlib
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mmrl.config.loader import load_recipe

ROOT = Path(__file__).resolve().parents[2]
ARM = "DGPO"


@pytest.fixture(scope="module")
def benchmark():
    """The script, imported as its command imports it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("cost_to_quality")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize(
    ("curve", "seconds"),
    [
        ([(0, 0.4), (10, 0.6), (20, 0.6), (30, 0.5)], 10),
        ([(0, 0.4), (10, 0.6), (20, 0.5), (30, 0.6), (40, 0.7)], 30),  # it has to stay there
        ([(0, 0.4), (10, 0.6)], None),  # the last one alone does not say that it stays
        ([(0, 0.6), (10, 0.6)], 0),
        ([], None),
    ],
)
def test_the_target_is_reached_at_the_first_of_two_evaluations(benchmark, curve, seconds):
    assert benchmark.cost_to(curve, 0.55) == seconds


GIVEN = {"search_seed": 0, "search_seconds": 80.0, "seconds": 300.0, "seeds": [11, 12], "rate": None}


def base(benchmark):
    return benchmark.Spec(ARM, 0.0, 0, 300.0, 0.55, 5, 256, "pictures")


def kept(benchmark, path, curves, flop=2e12):
    """A file with a run for each rate and seed, and one whose operations are counted; ``curves`` by rate."""
    rows = {}
    for rate, curve in curves.items():
        asked = [(0, 80.0, 2.0), *((seed, 300.0, 0.55) for seed in GIVEN["seeds"])]
        for seed, budget, target in asked:
            spec = replace(base(benchmark), rate=rate, seed=seed, budget=budget, target=target)
            rows[spec.key] = {"spec": asdict(spec), "curve": curve}
        counted = replace(base(benchmark), rate=rate, budget=1.0, target=2.0, every=1, samples=8, unit="FLOP")
        rows[counted.key] = {"spec": asdict(counted), "curve": [(0, 0.4), (flop, 0.4)]}
    path.write_text(json.dumps(rows))
    return benchmark.Runs(path, {}, train=False)


def test_the_search_leaves_the_best_rate_and_censored_runs_are_shown(benchmark, tmp_path):
    low, high = [(0.0, 0.4), (300.0, 0.5), (600.0, 0.52)], [(0.0, 0.4), (100.0, 0.56), (200.0, 0.58)]
    curves = {rate: high if rate == 3e-4 else low for rate in benchmark.JOBS["pictures"].rates}
    runs, one = kept(benchmark, tmp_path / "runs.json", curves), base(benchmark)
    assert benchmark.search(one, runs, 80.0, 0) == 3e-4
    found = replace(one, rate=3e-4)
    start = f"| pictures, 0.55 | {ARM} | 0.0003 |"
    # Five steps of 2 x 10^12 operations each to the target; ten steps took 200 seconds.
    assert benchmark.row(one, runs, argparse.Namespace(**GIVEN)) == (
        f"{start} 100, 100 | 100 | 100 (100 to 100) | 10.0 | 20.00 | 2.00 | 0.570 |"
    )
    assert benchmark.line(found, [high, low, low], 2e12) == (
        f"{start} 100, > 300, > 300 | not reached |  |  | 60.00 | 2.00 | 0.530 |"
    )


def test_a_row_is_not_printed_before_its_runs_are_done(benchmark, tmp_path):
    path, curve = tmp_path / "runs.json", [(0.0, 0.4), (9.0, 0.6), (20.0, 0.6)]
    runs = kept(benchmark, path, dict.fromkeys(benchmark.JOBS["pictures"].rates, curve))
    asked = argparse.Namespace(**GIVEN)
    assert benchmark.row(base(benchmark), runs, asked) is not None
    for missing in runs.rows:
        if "FLOP" in missing and "7.5e-05" not in missing:  # operations are counted with the rate that is left
            continue
        if "seed 1" in missing and "7.5e-05" not in missing:
            continue
        path.write_text(json.dumps({key: row for key, row in runs.rows.items() if key != missing}))
        assert benchmark.row(base(benchmark), runs, asked) is None, missing


def test_an_interval_holds_the_mean_of_logarithms(benchmark):
    # Costs of 100, 200 and 400: the logarithms' standard deviation is log 2, and t of two degrees is 4.303.
    half = 4.303 * math.log(2) / math.sqrt(3)
    low, high = 200 * math.exp(-half), 200 * math.exp(half)
    assert benchmark.interval([100.0, 400.0, 200.0]) == f"200 ({low:.0f} to {high:.0f})"
    assert benchmark.interval([100.0, math.inf, 200.0]) == ""
    assert benchmark.interval([100.0]) == ""


def test_the_page_has_the_rows_that_the_runs_give(benchmark, monkeypatch, capsys):
    kept = ROOT / "benchmarks" / "results" / "cost_to_quality.json"
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(kept), "--print"])
    benchmark.main()
    printed, page = capsys.readouterr().out, (ROOT / "docs" / "reference" / "cost_to_quality.md").read_text()
    assert printed.count("\n") > 2
    assert printed in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--peer", "ddpo=/nowhere"],
            "--peer ddpo: only flow_grpo, flow_factory, trl can train on pictures and text here",
        ),
        (["--job", "text", "--peer", "flow_grpo=/nowhere"], "--peer flow_grpo: only trl can train on text here"),
        (["--peer", "flow_grpo"], "--peer flow_grpo: name its checkout"),
        (["--peer", "flow_factory"], "--peer flow_factory: name its checkout"),
        (["--job", "text", "--arms", "DGPO"], "--arms 'DGPO': the arms of text are 'GRPO', 'DRPO'"),
        (["--gpu"], "--gpu: torch sees no GPU here"),
    ],
)
def test_what_cannot_be_trained_here_is_named(benchmark, tmp_path, monkeypatch, words, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["x", *words, "--json", str(tmp_path / "runs.json")])
    with pytest.raises(SystemExit, match=said):
        benchmark.main()


def test_every_arm_is_a_recipe(benchmark):
    for name, job in benchmark.JOBS.items():
        for arm in job.arms:
            given = benchmark.Spec(arm, 1e-4, 1, 1.0, 2.0, 1, 8, name)
            assert load_recipe([job.recipe], given.overrides).recipe.optim.lr == 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("arm", "job"), [(ARM, "pictures"), ("DRPO", "text")])
def test_a_run_is_trained_until_its_budget_is_spent(benchmark, arm, job):
    spec = benchmark.Spec(arm, 1.5e-4, seed=1, budget=1.0, target=2.0, every=1, samples=8, job=job)
    (began, _), *between, (spent, success) = benchmark.run(spec, {})  # a fast machine takes several steps
    assert began == 0
    assert all(seconds <= 1 for seconds, _ in between)
    assert spent > 1
    assert 0 <= success <= 1


def test_a_peers_evaluation_is_of_the_weights_that_it_trains(benchmark, tmp_path):
    jobs = importlib.import_module("cost_jobs")
    spec = benchmark.Spec("peer:flow_grpo", 1e-4, 1, 1.0, 2.0, 1, 16, "pictures")
    context, success = jobs.opened(jobs.JOBS["pictures"], spec.overrides, tmp_path)
    assert success(16) > 0
    for parameter in context.policy.trainable.values():
        parameter.data.zero_()
    assert success(16) == 0
