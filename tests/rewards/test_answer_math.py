"""answer:math with math-verify itself, in its process: what it adds, what it may not pay for, hostile answers."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards import loading, mathverify
from mmrl.rewards.calling import Caller

answer = mmrl.load("rewards", "answer")
ROOT = Path(__file__).resolve().parents[2]
HOSTILE = ("\\boxed{9^{9^{9^{9}}}}", "\\boxed{(10^{10^{10}})!}")
installed = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math-verify")


@pytest.fixture(scope="module")
def reward():
    pytest.importorskip("math_verify")
    reward = answer.math(deadline=0.5)
    yield reward
    reward.close()


def samples(texts, truth="41"):
    return [Sample(Prompt(f"p/{i}", "?", {"answer": truth}), SampleId(0, 0, 0, i), text=t) for i, t in enumerate(texts)]


def correct(reward, text, truth):
    return reward.score(samples([text], truth), context=Context())["correct"][0]


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("\\boxed{x+1}", "1+x", True),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", True),
        ("\\boxed{(x-1)^2}", "x^2+2x+1", False),
        ("\\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{\\sqrt{2}}{2}", True),
        ("\\boxed{1\\frac{1}{2}}", "3/2", True),
        ("\\boxed{1\\frac{1}{2}}", "11/2", False),
        ("\\boxed{3\\text{ m}}", "3\\text{ cm}", False),
        ("\\boxed{3m}", "3n", False),
        ("\\boxed{9}", "9\\%", False),
        ("\\boxed{0.3333333}", "1/3", False),
        ("\\boxed{1.41421356237309505}", "\\sqrt{2}", False),
        ("\\boxed{\\sqrt2+10^{-20}}", "\\sqrt2", False),
        ("\\boxed{x^2+4=0}", "x^2+1=0", False),
        ("\\boxed{5=3}", "3", False),
        ("\\boxed{1} or \\boxed{2}", "2", False),
        ("\\boxed{(1+i)^2}", "2i", True),
        ("\\boxed{3 < x}", "x > 3", True),
        ("The answer is $2\\sqrt{2}$.", "\\sqrt{8}", True),
        ("So 41 in all", "41", True),
        ("\\boxed{\\mathrm{??}}", "41", False),
    ],
)
def test_algebra(reward, text, truth, right):
    assert correct(reward, text, truth) == float(right)


@pytest.mark.slow
def test_no_wrong_answer_of_the_table_is_paid(reward):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        benchmark = importlib.import_module("answers")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    counts = Counter(benchmark.verdicts("math", benchmark.cases()))
    assert counts["falsely paid"] == counts["not judged"] == 0
    assert counts["falsely refused"] <= 3


@pytest.mark.slow
def test_hostile_answers_end_the_process_and_not_the_reward(reward):
    assert correct(reward, "\\boxed{x+1}", "1+x") == 1.0
    before, started = reward._verify.late, time.process_time()
    texts = [
        *HOSTILE,
        "\\boxed{" + "(" * 190 + "x" + ")" * 190 + "}",
        "\\boxed{" + "x+" * 100_000 + "1}",
        "\\boxed{41}",
    ]
    assert reward.score(samples(texts), context=Context())["correct"] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert reward._verify.late > before
    assert time.process_time() - started < 8  # ours: the time is the other process's
    assert correct(reward, "\\boxed{x+1}", "1+x") == 1.0


def test_a_hostile_answer_ends_the_process_the_next_starts_one_and_close_ends_that(reward):
    assert correct(reward, "\\boxed{x+1}", "1+x") == 1.0
    first = reward._verify._child.process
    assert correct(reward, HOSTILE[0], "1") == 0.0
    assert first.poll() == -signal.SIGPROF
    caller = Caller(loading.Loaded("math", reward.score, reward.__mmrl_reward__, False, None, "here"), timeout=1)
    (found,) = caller.many([samples(["\\boxed{x+1}"], "1+x")], Context())  # in a thread of its own
    assert found.total == [1.0]
    second = reward._verify._child.process
    assert second.pid != first.pid
    caller.close()
    assert second.poll() is not None


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "math_verify" else found(name))
    with pytest.raises(UserError, match=r"pip install .*\[math\]'"):
        answer.math()


@installed
def test_a_process_that_does_not_start_says_why(monkeypatch, tmp_path):
    (tmp_path / "child.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(mathverify, "_SCRIPT", tmp_path / "child.py")
    with pytest.raises(UserError, match="status 3"):
        mathverify.MathVerify(1.0).same("x", "y")


@installed
def test_a_deadline_that_is_none_is_refused():
    with pytest.raises(UserError, match=r"options\.deadline"):
        answer.math(deadline=0)
