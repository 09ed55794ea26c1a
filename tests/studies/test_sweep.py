"""``mmrl sweep``: successive halving against its definition, and searches with a real tiny model."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from mmrl.core.errors import UserError
from mmrl.studies.sweep.halving import kept, rounds, work
from mmrl.studies.sweep.searching import combinations, over_seeds, read_sweep
from tests.support import tiny
from tests.support.cli import mmrl
from tests.support.sweep import RECIPE, REWARDS


@pytest.mark.parametrize(
    ("trials", "factor", "counts", "shares"),
    [
        (4, 2, [4, 2, 1], [4, 2, 1]),
        (2, 2, [2, 1], [2, 1]),
        (5, 2, [5, 3, 2, 1], [8, 4, 2, 1]),
        (9, 3, [9, 3, 1], [9, 3, 1]),
        (3, 4, [3, 1], [4, 1]),
    ],
)
def test_rounds_are_those_of_successive_halving(trials, factor, counts, shares):
    found = rounds(trials, factor)
    assert [one.trials for one in found] == counts
    assert [one.share for one in found] == [Fraction(1, n) for n in shares]


def test_what_a_search_costs():
    plan = rounds(4, 2)
    assert work(plan, goes_on=False) == 3  # 4/4 + 2/2 + 1
    assert work(plan, goes_on=True) == 2  # 4/4 + 2/4 + 1/2
    assert [one.steps(125) for one in plan] == [31, 62, 125]
    assert rounds(64, 2)[0].steps(3) == 1


def test_the_best_are_kept_and_a_trial_that_diverged_is_not():
    assert kept({1: 0.2, 2: None, 3: 0.5, 4: 0.5}, 2) == [3, 4]
    assert kept({1: 0.5, 3: 0.5, 4: 0.7}, 2) == [1, 4]
    assert kept({1: None, 2: float("nan"), 3: -1.0}, 2) == [3]
    assert kept({1: None}, 1) == []


def test_trials_are_all_combinations():
    assert combinations(["optim.lr=1e-5, 3e-5", "algorithm={type: grpo},{type: gspo, clip_range: 0.1}"]) == [
        ("optim.lr=1e-05", 'algorithm={"type": "grpo"}'),
        ("optim.lr=1e-05", 'algorithm={"type": "gspo", "clip_range": 0.1}'),
        ("optim.lr=3e-05", 'algorithm={"type": "grpo"}'),
        ("optim.lr=3e-05", 'algorithm={"type": "gspo", "clip_range": 0.1}'),
    ]


@pytest.mark.parametrize(
    ("tried", "said"),
    [
        (["optim.lr"], "is no setting with values; write --try optim.lr=1e-5,3e-5"),
        (["optim.lr=1e-5"], "give two different values or more"),
        (["optim.lr=1e-5,1e-5"], "give two different values or more"),
        (["optim.lr=1,2", "optim.lr=3,4"], "--try optim.lr is given twice; put all its values into one"),
        (["optim.lr=[1,2"], "--try optim.lr: "),
        (
            [f"seed={','.join(map(str, range(20)))}"],
            "--try seed: a seed is chance, and the best of several is no setting",
        ),
        (["seed=1,2", "optim.lr=1,2"], "add --seeds 3"),
        ([f"{key}={','.join(map(str, range(1, 21)))}" for key in ("optim.lr", "threads")], "for 400"),
    ],
)
def test_values_that_cannot_be_read_are_refused(tried, said):
    with pytest.raises(UserError, match=r"--try") as caught:
        combinations(tried)
    assert said in str(caught.value)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    tiny.language_model(folder / "tinylm", sharp=0.3)
    (folder / "two.py").write_text(REWARDS)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def heldout(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "heldout.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_search_is_stopped_and_goes_on_and_leaves_out_what_diverges(root, capsys):
    command = ["sweep", str(root / "recipe.yaml"), "--try", "optim.lr=0.02,1e30,0.005", "--out", str(root / "out")]
    (root / "stop").touch()
    assert mmrl(*command) == 0
    assert "stopped; continue with the same command and --resume" in capsys.readouterr().err
    assert read_sweep(root / "out").results == {}
    assert mmrl(*command, "--resume") == 0
    said = capsys.readouterr()
    found = read_sweep(root / "out").results
    left = 1 if (3, 1, 0) in found else 3
    assert sorted(found) == [(1, 1, 0), (1, 2, 0), (1, 3, 0), (2, 1, 0), (2, 3, 0), (3, left, 0)]
    assert found[1, 2, 0].value is None
    assert "training diverged" in found[1, 2, 0].failed
    assert "trial-2 diverged and is left out" in said.err
    best = max((1, 3), key=lambda trial: found[2, trial, 0].value or 0.0)
    assert best == left
    lr = {1: "0.02", 3: "0.005"}[best]
    assert said.out.rstrip().endswith(f"mmrl train {root / 'recipe.yaml'} optim.lr={lr}")
    # Of a constant rate the same run goes on: 1, 2 and 4 of the recipe's 4 steps.
    assert heldout(root / "out" / f"trial-{best}") == [0, 1, 2, 4]
    assert heldout(root / "out" / f"trial-{4 - best}") == [0, 1, 2]
    before = (root / "out" / "sweep.json").read_text()
    assert mmrl(*command, "--resume", "--json") == 0  # nothing is left to train
    shown = json.loads(capsys.readouterr().out)
    assert shown["best"] in (None, shown["left"])
    assert (shown["left"], shown["run"]) == ([f"optim.lr={lr}"], str(root / "out" / f"trial-{best}"))
    assert (root / "out" / "sweep.json").read_text() == before
    assert mmrl(*command) == 2
    assert "already holds a search; go on with it with --resume" in capsys.readouterr().err
    assert mmrl(*command, "--resume", "--factor", "3") == 2
    assert "was begun with other settings or values" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_where_the_rate_depends_on_the_length_each_round_trains_anew(root, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["sweep", str(root / "recipe.yaml"), "optim.schedule=linear", "--out", str(out)]
    assert mmrl(*command, "--try", "optim.lr=0.02,0.005") == 0
    assert "each round trains anew" in capsys.readouterr().err
    found = read_sweep(out).results
    (best,) = (trial for number, trial, _ in found if number == 2)
    assert heldout(out / "round-1" / f"trial-{best}") == [0, 2]
    assert heldout(out / "round-2" / f"trial-{best}") == [0, 4]


@pytest.mark.slow
def test_where_all_diverge_the_search_says_so(root, tmp_path, capsys):
    command = ["sweep", str(root / "recipe.yaml"), "--try", "optim.lr=1e30,2e30", "--out", str(tmp_path / "out")]
    assert mmrl(*command) == 2
    assert "all trials of round 1 diverged" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_what_cannot_be_searched_is_refused_before_a_model_is_loaded(root, tmp_path, capsys):
    def refused(*words: str) -> str:
        assert mmrl("sweep", str(root / "recipe.yaml"), "--out", str(tmp_path / "out"), *words) == 2
        assert not (tmp_path / "out").exists()
        return " ".join(capsys.readouterr().err.split())

    assert "the trial optim.lr=-1:" in refused("--try", "optim.lr=0.1,-1")
    assert "eval.every: nothing is evaluated" in refused("--try", "optim.lr=0.1,0.2", "eval.every=null")
    assert "--factor 1: each round keeps one of so many trials" in refused("--try", "optim.lr=1,2", "--factor", "1")
    assert "holds no search" in refused("--try", "optim.lr=0.1,0.2", "--resume")
    measures = {
        "eval": ["eval.samples=2,4", "eval={every: 1, samples: 8},{every: 2, samples: 8}", "eval.temperature=0.5,1"],
        "data": ["data.heldout.count=8,9", "data.heldout={count: 8},{count: 8, operations: 2}"],
        "rewards": ["rewards[0].label=a,b"],
    }
    for key, tried in measures.items():
        for one in tried:
            said = refused("--try", one)
            assert f": {key} says another held-out figure" in said, said
    large = refused("--try", "optim.lr=0.1,0.2", f"seed={2**63 - 2}", "--seeds", "3")
    assert "seed: " in large, "the last of the seeds is one too"
    no_gpu = refused("--try", "device=cpu,cuda:99")
    assert "cuda:99" in no_gpu


# -- seeds and chance -------------------------------------------------------------------------------------------------


def test_a_lead_over_seeds_is_a_paired_interval():
    import scipy.stats

    chosen, other = {0: 0.5, 1: 0.62, 2: 0.41, 3: 0.7}, {0: 0.4, 1: 0.55, 2: 0.33, 3: 0.58}
    lead = over_seeds(chosen, other)
    found = scipy.stats.ttest_rel(list(chosen.values()), list(other.values())).confidence_interval(0.95)
    assert (lead.low, lead.high) == pytest.approx((found.low, found.high))
    assert lead.ahead
    assert not over_seeds(other, chosen).ahead
    assert not over_seeds(chosen, chosen).ahead, "all equal"
    assert not over_seeds({0: 1.0}, {0: 0.0}).ahead, "one seed says nothing"
    assert not over_seeds({}, {}).ahead


@pytest.mark.sweep("searches among settings that differ by chance alone")
def test_of_settings_that_differ_by_chance_few_are_ahead(sweep):
    import random

    draw, ahead = random.Random(3), 0
    tried = sweep.size(400, 20000)
    for _ in range(tried):
        one, other = ({seed: draw.gauss(0.5, 0.1) for seed in range(3)} for _ in range(2))
        lead = over_seeds(one, other)
        ahead += lead.ahead
        sweep.check(lead.low <= lead.value <= lead.high, (one, other))
    assert ahead / tried < 0.05
    sweep.done()


@pytest.mark.slow
def test_each_setting_is_trained_with_several_seeds_and_equal_ones_are_not_ahead(root, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["sweep", str(root / "recipe.yaml"), "train.steps=2", "seed=5", "eval.every=1", "--out", str(out)]
    command += ["--try", "runtime.patience=60,61", "--seeds", "2"]
    assert mmrl(*command) == 0
    said = capsys.readouterr()
    assert "together 3 whole trainings" in said.err  # (2 / 2 + 1 / 2) of two seeds
    assert "no setting is ahead: runtime.patience=60 cannot be told from runtime.patience=61" in said.err
    assert "(difference +0.00" in said.err
    assert " ± " in said.out
    results = read_sweep(out).results
    assert sorted(results) == [(1, 1, 5), (1, 1, 6), (1, 2, 5), (1, 2, 6), (2, 1, 5), (2, 1, 6)]
    assert results[1, 1, 5] != results[1, 1, 6]
    assert (results[1, 1, 6].value, results[1, 1, 5].value) == (results[1, 2, 6].value, results[1, 2, 5].value)
    resolved = json.loads((out / "trial-2" / "seed-6" / "resolved.json").read_text())
    assert resolved["seed"] == 6
    assert mmrl(*command, "--resume", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["best"], shown["left"], shown["seeds"]) == (None, ["runtime.patience=60"], [5, 6])


@pytest.mark.slow
def test_a_search_from_python_says_whether_a_setting_is_ahead(root, tmp_path):
    import mmrl as python

    arguments = {"changes": {"train.steps": 2, "eval.every": 1}, "out": tmp_path / "out"}
    found = python.search(root / "recipe.yaml", {"runtime.patience": [60, 61]}, **arguments)
    assert found.best == ()
    assert found.left == ("runtime.patience=60",)
    assert "no setting is ahead" in str(found)
    assert "try seeds=3" in str(found)
    for seeds in ("2", 2.0, True):
        with pytest.raises(python.UserError, match="give a number from 1 to 64"):
            python.search(root / "recipe.yaml", {"optim.lr": [0.1, 0.2]}, seeds=seeds, out=tmp_path / "other")
    assert "paired over held-out prompts" in str(found)
    assert found.run.finished
    assert found.table["seed"] == [0, 0, 0]
    with pytest.raises(python.UserError, match=r"tried seed: a seed is chance.* add seeds=3"):
        python.search(root / "recipe.yaml", {"seed": [1, 2]}, **arguments)
    with pytest.raises(python.UserError, match="give a list of values"):
        python.search(root / "recipe.yaml", {"optim.lr": 0.1}, **arguments)
