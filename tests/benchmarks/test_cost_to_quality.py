"""The time to a target: what counts as reached, the search by halving, and the table of runs that a file has."""

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from mmrl.config.loader import load_recipe

ROOT = Path(__file__).resolve().parents[2]
ARM = "5 steps"


@pytest.fixture(scope="module")
def benchmark():
    """The script, imported as its command imports it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("time_to_target")
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
    assert benchmark.time_to(curve, 0.55) == seconds


def kept(benchmark, path, given, curves):
    """A file with a run for each rate, seed and time; ``curves`` by rate."""
    rows = {}
    for rate, curve in curves.items():
        seeds = [(given.search_seed, seconds, 2.0) for seconds in (60, 120)]
        for seed, seconds, target in [*seeds, *((seed, given.seconds, given.target) for seed in given.seeds)]:
            spec = benchmark.spec(ARM, rate, seed, seconds, target, given)
            rows[spec.key] = {"spec": asdict(spec), "curve": curve}
    path.write_text(json.dumps(rows))
    return benchmark.Runs(path, {})


def test_the_search_leaves_the_best_rate_and_censored_runs_are_shown(benchmark, tmp_path):
    given = argparse.Namespace(
        search_seed=0,
        search_seconds=60,
        seconds=600.0,
        target=0.55,
        seeds=[11, 12],
        every=5,
        samples=256,
        job="pictures",
    )
    low, high = [(0.0, 0.4), (300.0, 0.5), (600.0, 0.52)], [(0.0, 0.4), (100.0, 0.56), (200.0, 0.58)]
    curves = {rate: high if rate == 3e-4 else low for rate in benchmark.JOBS["pictures"].rates}
    runs = kept(benchmark, tmp_path / "runs.json", given, curves)
    assert benchmark.search(ARM, runs, given) == 3e-4
    assert benchmark.line(ARM, 3e-4, [high, low], given) == "| 5 steps | 0.0003 | 100, > 600 | not reached | 0.540 |"
    assert "| 100, 100 | 100 |" in benchmark.line(ARM, 3e-4, [high, high], given)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peer", "ddpo=/nowhere"], "--peer ddpo: only flow_grpo, flow_factory can train on pictures here"),
        (["--job", "text", "--peer", "flow_grpo=/nowhere"], "--peer flow_grpo: only trl can train on text here"),
        (["--peer", "flow_grpo"], "--peer flow_grpo: name its checkout"),
        (["--peer", "flow_factory"], "--peer flow_factory: name its checkout"),
        (["--job", "text", "--arms", "dgpo"], "--arms 'dgpo': the job text has 'grpo', "),
    ],
)
def test_what_cannot_be_trained_here_is_named(benchmark, tmp_path, monkeypatch, words, said):
    monkeypatch.setattr(sys, "argv", ["x", *words, "--json", str(tmp_path / "runs.json")])
    with pytest.raises(SystemExit, match=said):
        benchmark.main()


def test_every_arm_is_a_recipe(benchmark):
    for name, job in benchmark.JOBS.items():
        for arm in job.arms:
            given = benchmark.Spec(arm, 1e-4, 1, 1.0, 2.0, 1, 8, name)
            assert load_recipe([job.recipe], given.overrides).recipe.optim.lr == 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("arm", "job"), [(ARM, "pictures"), ("half the samples", "text")])
def test_a_run_is_trained_until_its_budget_is_spent(benchmark, arm, job):
    spec = benchmark.Spec(arm, 1.5e-4, seed=1, seconds=1.0, target=2.0, every=1, samples=8, job=job)
    (began, _), *between, (spent, success) = benchmark.run(spec, {})  # a fast machine takes several steps
    assert began == 0
    assert all(seconds <= 1 for seconds, _ in between)
    assert spent > 1
    assert 0 <= success <= 1


def test_a_peers_evaluation_is_of_the_weights_that_it_trains(benchmark, tmp_path):
    jobs = importlib.import_module("time_jobs")
    spec = benchmark.Spec("peer:flow_grpo", 1e-4, 1, 1.0, 2.0, 1, 16, "pictures")
    context, success = jobs.opened(jobs.JOBS["pictures"], spec.overrides, tmp_path)
    assert success(16) > 0
    for parameter in context.policy.trainable.values():
        parameter.data.zero_()
    assert success(16) == 0
