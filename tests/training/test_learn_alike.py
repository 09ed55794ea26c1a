"""The comparison of learning curves: its figures on curves whose answer is known, and both forms of a short run."""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def alike():
    """The benchmark, imported as its command imports it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("learn_alike")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_the_difference_of_the_forms_stands_beside_the_spread_over_seeds(alike):
    one = [{0: 0.4, 5: 0.5, 10: 0.6}, {0: 0.4, 5: 0.6, 10: 0.8}]
    near = [{0: 0.4, 5: 0.52, 10: 0.66}, {0: 0.4, 5: 0.62, 10: 0.86}]
    found = alike.compare(one, near)
    spread = math.sqrt((0.1**2 / 2 + 0.2**2 / 2) / 2)  # of two evaluations, equal in both forms; the first has none
    assert found["spread"] == pytest.approx(spread)
    assert found["chance"] == pytest.approx(1.96 * spread)  # of two means of two seeds
    assert found["largest"] == {"step": 10, "difference": pytest.approx(0.06), "error": pytest.approx(0.0, abs=1e-9)}
    assert found["within"] is True
    assert found["rise"]["one"] == {
        "mean": pytest.approx(0.3),
        "error": pytest.approx(0.1),
        "by_seed": pytest.approx([0.2, 0.4]),
    }
    far = [{step: value - 0.3 * (step == 5) for step, value in curve.items()} for curve in one]
    assert alike.compare(one, far)["largest"]["difference"] == pytest.approx(-0.3)
    assert alike.compare(one, far)["within"] is False


def test_one_seed_says_nothing_of_a_spread(alike):
    found = alike.compare([{0: 0.4, 5: 0.5}], [{0: 0.4, 5: 0.5}])
    assert found["within"] is None
    assert json.loads(json.dumps(alike.finite(found), allow_nan=False))["spread"] is None


def test_runs_evaluated_at_other_steps_are_not_compared(alike):
    with pytest.raises(ValueError, match="same steps"):
        alike.compare([{0: 0.4, 5: 0.5}], [{0: 0.4, 6: 0.5}])


def test_steps_count_as_equal_until_the_first_that_is_not(alike, tmp_path):
    for name, rewards in (("one", [0.5, 0.6, 0.7, 0.8]), ("several", [0.5, 0.6001, 0.75, 0.8])):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": n, "reward/mean": value}) + "\n" for n, value in enumerate(rewards, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    assert alike.equal_steps(tmp_path / "one", tmp_path / "several") == 2


@pytest.mark.slow
def test_both_forms_of_a_short_run_are_trained_once_and_compared(alike, tmp_path, capsys):
    pytest.importorskip("ray")
    small = ["train.steps=2", "train.prompts_per_step=8", "train.group_size=8", "sampling.batch_size=16"]
    small += ["rewards.1.batch_size=4", "eval.every=2", "eval.samples=32"]  # several calls come at once for all devices
    words = ["--recipes", "sums-capo", "--seeds", "0", "--out", str(tmp_path / "runs"), "--json", str(tmp_path / "x")]
    alike.main([*words, *small])
    found = json.loads((tmp_path / "x").read_text())["recipes"]["sums-capo"]
    one, several = (found["curves"]["number/correct"][form][0] for form in ("one", "several"))
    assert one.keys() == {"0", "2"}
    assert several == pytest.approx(one, abs=1 / 32)  # after two updates a token may part, and with it an answer
    assert found["devices"][0]["judged"] == 4
    assert found["equal_steps"] == [2]
    assert "sums-capo: held-out `number/correct`, 32 samples" in capsys.readouterr().out

    alike.main([*words, *small])
    assert "trained" not in capsys.readouterr().err
    with pytest.raises(SystemExit, match="other overrides"):
        alike.main([*words, *small, "optim.lr=1e-3"])
