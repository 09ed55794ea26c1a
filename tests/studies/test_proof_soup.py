"""The proof of Bone Soup: its measures against a case counted by hand, its rewards, and that it resumes."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def modules():
    """The script and its rewards, imported as its command imports them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield [importlib.import_module(name) for name in ("proof_soup", "soup_rewards")]
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def models(*rows):
    return [{"arm": arm, "mu": mu, "lambda": None, "rewards": list(point)} for arm, mu, point in rows]


CASE = models(
    ("bone soup", 0.0, (2, 6)),
    ("bone soup", 0.25, (3, 5)),
    ("bone soup", 0.5, (4, 4)),
    ("bone soup", 0.75, (3, 4)),
    ("bone soup", 1.0, (6, 1)),
    ("mix", None, (3, 3)),
    ("base", None, (1, 2)),
)


def test_the_measures_are_those_of_a_case_counted_by_hand(modules):
    found = modules[0].figures({"models": CASE, "units": [1, 1]})
    # The reference is (1, 1). Columns of the bone soup's area, from the left: 1 x 5, 1 x 4, 1 x 3; (6, 1) adds none.
    assert found["bone soup"]["hypervolume"] == pytest.approx(12)
    assert found["mix"]["hypervolume"] == pytest.approx(4)
    assert found["base"]["hypervolume"] == 0
    # From the third preference to the fourth the first reward falls.
    assert found["bone soup"]["controllability"] == pytest.approx(3 / 4)
    assert found["bone soup"]["sparsity"] == pytest.approx((2 + 2 + 13) / 3)
    assert found["bone soup"]["utility"] == pytest.approx((6 + 4.5 + 4 + 3.25 + 6) / 5)
    assert found["mix"] == {"hypervolume": 4, "controllability": None, "sparsity": None, "utility": pytest.approx(3)}
    doubled = modules[0].figures({"models": CASE, "units": [1, 2]})["bone soup"]
    assert doubled["hypervolume"] == pytest.approx(24)
    assert doubled["utility"] == pytest.approx((12 + 8.25 + 6 + 4.25 + 6) / 5)


def test_the_table_has_the_mean_and_the_range_of_seeds(modules):
    better = [{**one, "rewards": [2 * r for r in one["rewards"]]} for one in CASE]
    seeds = [{"models": of, "rewards": ["right", "short"], "units": [1, 1]} for of in (CASE, better)]
    lines = modules[0].table(seeds)
    assert lines[0] == "| | hypervolume | controllability | sparsity | utility |"
    assert lines[2].startswith("| bone soup | 30 (12 to 48) | 0.75 (0.75 to 0.75) |")
    assert lines[3].startswith("| mix | 10 (4 to 16) | - | - | 4.5 ")
    assert "| bone soup | 0.25 | 4.5 (3 to 6) | 7.5 (5 to 10) |" in modules[0].rewards(seeds)


def test_a_seed_that_stands_in_the_file_is_not_trained_again(modules, tmp_path, monkeypatch, capsys):
    file, result = tmp_path / "r.json", {"models": CASE, "rewards": ["right", "short"], "units": [1, 1]}
    file.write_text(json.dumps({"sums, seed 3, beta 0.7": result}))
    arguments = ["proof_soup", "--seeds", "3", "--json", str(file), "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", arguments)
    modules[0].main()
    assert "| bone soup | 12 | 0.75 |" in capsys.readouterr().out
    assert not (tmp_path / "work").exists()
    other = argparse.Namespace(job="sums", beta=0.7, overrides=["optim.lr=1"], json=file)
    monkeypatch.setattr(modules[0], "measured", lambda given, seed: {"models": CASE, "seed": seed})
    assert modules[0].of(other, 3)["seed"] == 3  # other settings are another result
    assert list(json.loads(file.read_text())) == ["sums, seed 3, beta 0.7", "sums, seed 3, beta 0.7, optim.lr=1"]


def sample(**what):
    return Sample(Prompt("p", "p"), SampleId(0, 0, 0, 0), **what)


def test_the_rewards_that_conflict(modules):
    context = Context(step=0)
    rewards = modules[1]
    said = ["answer: 12", " answer: 12\n", "1+1=2\n\n" + "answer: 2", "12", "answer: " + "1" * 99]
    texts = [sample(text=text) for text in said] + [sample(text="answer: 12", truncated=True)]
    found = rewards.short(texts, context=context)
    assert found == pytest.approx([1 - 10 / 80, 1 - 10 / 80, 1 - 16 / 80, 0, 0, 0])
    half = Image.new("RGB", (2, 1), (255, 0, 0))
    half.putpixel((1, 0), (0, 255, 0))
    pictures = [Image.new("RGB", (2, 1), colour) for colour in ("red", "white", "black", "blue")] + [half]
    assert rewards.red([sample(image=one) for one in pictures], context=context) == pytest.approx([1, 0, 0, -0.5, 0.25])
