"""The map of CAPO: critics of a known accuracy, what votes do to their errors, and the recipes and table of the map."""

import importlib
import json
import random
import sys
from dataclasses import asdict
from math import comb, sqrt
from pathlib import Path

import pytest

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.judging.rubric import split_steps

ROOT = Path(__file__).resolve().parents[2]
CRITIC = ROOT / "benchmarks/step_critic.py"
PROMPT = Prompt("x", "Compute 47+86-25+9", {"answer": "117", "steps": ["47+86=133", "133-25=108", "108+9=117"]})
SLIP = "47+86=133\n\n133-25=118\n\n118+9=127\n\nanswer: 127"


@pytest.fixture(scope="module")
def benchmark():
    """The script, imported as its command imports it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("capo_map")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def critic(name="Critic", **options):
    return mmrl.load("rewards", f"{CRITIC}:{name}")(**options)


def sample(text, n=0):
    return Sample(PROMPT, SampleId(0, 0, 0, n), text=text)


def test_a_perfect_critic_takes_from_the_wrong_step_alone():
    found = critic().score([sample(SLIP)], context=Context())
    ((start, end, value),) = found["spans"][0].spans
    assert (SLIP[start:end], value) == ("133-25=118", -1.0)
    assert (found["score"], found["right"], found["alike"]) == ([0.0], [0.75], [1.0])
    assert critic("Share").score([sample(SLIP), sample("")], context=Context()) == [0.75, 0.0]


def drawn(n):
    """``n`` different responses of four steps, of which the second is wrong."""
    return [SLIP.replace("answer: 127", f"answer: {127 + k}") for k in range(n)]


@pytest.mark.parametrize("accuracy", [0.9, 0.75, 0.5])
def test_a_critique_is_right_about_a_step_with_its_accuracy(accuracy):
    texts = drawn(500)
    alike = critic(accuracy=accuracy).score([sample(t) for t in texts], context=Context())["alike"]
    n = 4 * len(texts)
    assert sum(alike) / len(texts) == pytest.approx(accuracy, abs=4 * sqrt(accuracy * (1 - accuracy) / n))


@pytest.mark.parametrize(("vote", "least"), [("intersection", 4), ("majority", 2), ("union", 1)])
def test_votes_of_independent_critiques_err_as_the_binomial_law_says(vote, least):
    """A wrong step is found where at least ``least`` of 4 name it; each does so with the chance 0.75."""
    texts = drawn(600)
    found = critic(accuracy=0.75, votes=4, vote=vote).score([sample(t) for t in texts], context=Context())["spans"]
    second = split_steps(SLIP)[1].start
    hit = sum(any(start == second for start, _, _ in spans.spans) for spans in found) / len(texts)
    chance = sum(comb(4, k) * 0.75**k * 0.25 ** (4 - k) for k in range(least, 5))
    assert hit == pytest.approx(chance, abs=4 * sqrt(chance * (1 - chance) / len(texts)) + 1e-9)


def test_the_penalties_of_votes_are_those_of_the_binomial_law(benchmark, monkeypatch, capsys):
    wrong, right = benchmark.punished(0.75, 4, "majority")
    assert wrong == pytest.approx(1 - 0.25**4 - 4 * 0.75 * 0.25**3)
    assert right == pytest.approx(1 - 0.75**4 - 4 * 0.25 * 0.75**3)
    assert benchmark.punished(0.9, 8, "average") == pytest.approx((0.9, 0.1))
    assert benchmark.punished(0.75, 2, "majority") == benchmark.punished(0.75, 2, "union")
    monkeypatch.setattr(sys, "argv", ["capo_map", "--votes", "0.75"])
    benchmark.main()
    assert "| intersection | 0.750 and 0.250 | 0.562 and 0.062 | 0.316 and 0.004 |" in capsys.readouterr().out


def test_equal_responses_get_equal_critiques_and_votes_differ():
    texts = drawn(40)
    of = critic(accuracy=0.75, votes=2, vote="average")
    again = critic(accuracy=0.75, votes=2, vote="average")
    shuffled = random.Random(0).sample(texts, len(texts))
    first = dict(zip(texts, of.score([sample(t) for t in texts], context=Context())["spans"], strict=True))
    then = dict(zip(shuffled, again.score([sample(t, 7) for t in shuffled], context=Context())["spans"], strict=True))
    assert first == then
    assert {value for spans in first.values() for _, _, value in spans.spans} == {-0.5, -1.0}
    other = critic(accuracy=0.75, votes=2, vote="average", seed=1)
    assert other.score([sample(t) for t in texts], context=Context())["spans"] != list(first.values())


@pytest.mark.parametrize("options", [{"accuracy": 0.4}, {"accuracy": 75}, {"votes": 0}, {"vote": "mean"}])
def test_a_critic_that_cannot_be_is_refused(options):
    with pytest.raises(UserError, match="options"):
        critic(**options)


@pytest.mark.parametrize("arm", ["grpo", "judge", "capo:1", "capo:0.75:4:union", "share:0.9"])
def test_every_arm_is_a_recipe_that_differs_in_algorithm_and_rewards_only(benchmark, arm):
    model = benchmark.MODELS / "sums-qwen3"
    spec = benchmark.Spec(arm, 5, 0, 20, 120, 512, 3e-4, 50.0 if arm == "judge" else None)
    plain = benchmark.Spec("grpo", 5, 0, 20, 120, 512, 3e-4)
    mine, other = (load_recipe(["sums"], benchmark.overrides(s, model)).recipe for s in (spec, plain))
    left = {"algorithm", "rewards", *(("train", "scoring") if arm == "judge" else ())}
    assert mine.model_dump(exclude=left) == other.model_dump(exclude=left)
    assert mine.algorithm.type == ("capo" if arm.startswith(("capo", "judge")) else "grpo")
    assert len(mine.rewards) == 2 - (arm == "grpo")


@pytest.mark.parametrize("arm", ["capo", "capo:0.9:4", "ppo", "grpo:1"])
def test_an_arm_that_does_not_exist_is_refused(benchmark, arm):
    with pytest.raises(SystemExit, match="--arms"):
        benchmark.rewards(arm)


def test_runs_in_the_file_are_not_done_again(benchmark, tmp_path, capsys, monkeypatch):
    rows = {}
    for arm, seed, success in (("grpo", 0, 0.4), ("grpo", 1, 0.5), ("capo:1", 0, 0.7)):
        spec = benchmark.Spec(arm, 5, seed, benchmark.STEPS[5], 120, 512, 3e-4)
        before, alike = (0.25, None) if arm == "grpo" else (None, 1.0)
        rows[spec.key] = {"spec": asdict(spec), "success": success, "before": before, "cpu_seconds": 50, "alike": alike}
    (tmp_path / "runs.json").write_text(json.dumps(rows))
    words = ["capo_map", "--json", str(tmp_path / "runs.json"), "--lengths", "5", "--arms", "grpo", "--seeds", "0", "1"]
    monkeypatch.setattr(sys, "argv", words)
    benchmark.main()
    printed = capsys.readouterr().out
    assert "| before | | 0.250 | |" in printed
    assert "| grpo | 0.0003 | 0.450 (0.400 to 0.500, 2 seeds) |  |" in printed
    assert "| capo:1 | 0.0003 | 0.700 | 1.00 |" in printed
