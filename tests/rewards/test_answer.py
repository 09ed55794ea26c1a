"""The verifiers of final answers: what the answer is, when it is right, and what a hostile response cannot do."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context, Failed
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards import loading
from mmrl.rewards.answers import boxed
from mmrl.rewards.numerals import Quantity, last_quantity, quantity

answer = mmrl.load("rewards", "answer")


def sample(text: str | None, truth: object = "41", truncated: bool = False) -> Sample:
    return Sample(Prompt("p/1", "?", {"answer": truth}), SampleId(0, 0, 0, 0), text=text, truncated=truncated)


def correct(reward: object, text: str | None, truth: object = "41") -> object:
    (found,) = reward.score([sample(text, truth)], context=Context())["correct"]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("left", "left", True),
        (" Left.\n", "left", True),
        ('"left"', "left", True),
        ("\N{FULLWIDTH LATIN SMALL LETTER L}eft", "left", True),
        ("three  red\ncircles", "three red circles", True),
        ("left or right", "left", False),
        ("lef", "left", False),
        ("", "left", False),
        ("3", 3, True),
        ("True", True, True),
        ("right", ["left", "right"], True),
        ("up", ["left", "right"], False),
    ],
)
def test_exact(text, truth, right):
    assert correct(answer.exact(), text, truth) == float(right)


def test_exact_reads_what_follows_the_last_marker():
    reward = answer.exact(after="answer:")
    assert correct(reward, "12+34=46\n\nanswer: 41") == 1.0
    assert correct(reward, "answer: 41\n\nanswer: 46") == 0.0
    assert correct(reward, "41") == 0.0
    assert correct(answer.exact(ignore_case=False), "LEFT", "left") == 0.0


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("46-5=41", "41", True),
        ("it is 41.", "41", True),
        ("41 apples, not 12", "41", False),
        ("1,234", "1234", True),
        ("$1,234.50", 1234.5, True),
        ("the answer is -5", "-5", True),
        ("the answer is \N{MINUS SIGN}5", "-5", True),
        ("50-8", "8", False),
        ("(1)-8", "8", False),
        ("x=-8", "-8", True),
        ("6e3", 6000, True),
        ("0.1", "0.1", True),
        ("0.10", 0.1, True),
        (".5", "1/2", True),
        ("3 / 4", "0.75", True),
        ("25%", "0.25", True),
        ("12\\%", "12%", True),
        ("none", "41", False),
        ("", "41", False),
        ("0.3000001", "0.3", False),
    ],
)
def test_number(text, truth, right):
    assert correct(answer.number(), text, truth) == float(right)


def test_number_tolerance_is_relative():
    reward = answer.number(tolerance=0.01)
    assert correct(reward, "100.9", 100) == 1.0
    assert correct(reward, "101.1", 100) == 0.0
    assert correct(reward, "-100.9", -100) == 1.0
    assert correct(reward, "0.001", 0) == 0.0


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("so \\boxed{41}.", "41", True),
        ("\\boxed{1} then \\boxed{41}", "41", True),
        ("\\boxed{41} then \\boxed{1}", "41", False),
        ("41", "41", False),
        ("\\boxed{41", "41", False),
        ("\\boxed{\\frac{1}{2}}", "0.5", True),
        ("\\boxed{\\dfrac12}", "1/2", True),
        ("\\boxed{\\left( x + 1 \\right)}", "(x+1)", True),
        ("\\boxed{5 \\text{ cm}}", "5cm", True),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}", True),
        ("\\boxed{x+1}", "1+x", False),
        ("\\boxed{$41$}", "\\boxed{41}", True),
    ],
)
def test_boxed(text, truth, right):
    assert correct(answer.boxed(), text, truth) == float(right)


def test_format_is_a_part_of_its_own_and_weighted():
    reward = answer.number(after="answer:", pattern=r"(\S+\n\n)+answer: \d+", pattern_weight=0.25)
    texts = ["40+1=41\n\nanswer: 41", "answer: 41", "40+2=42\n\nanswer: 42", "no"]
    found = reward.score([sample(t) for t in texts], context=Context())
    assert found["correct"] == [1.0, 1.0, 0.0, 0.0]
    assert found["format"] == [1.0, 0.0, 1.0, 0.0]
    assert found["score"] == [1.0, 0.75, 0.25, 0.0]
    assert "format" not in answer.number().score([sample("41")], context=Context())


def test_a_truncated_response_is_not_right():
    rows = answer.number().score([sample("answer: 41", truncated=True), sample("answer: 41")], context=Context())
    assert rows["score"] == [0.0, 1.0]


def test_what_cannot_be_judged_fails_and_is_named():
    for reward, broken in (
        (answer.exact(), Sample(Prompt("p/2", "?"), SampleId(0, 0, 0, 0), text="41")),
        (answer.exact(), sample("41", [])),
        (answer.number(), sample("41", "forty-one")),
        (answer.number(), sample(None)),
    ):
        good, bad = reward.score([sample("41"), broken], context=Context())["score"]
        assert good == 1.0
        assert isinstance(bad, Failed)
        assert broken.prompt.id in bad.reason or "no text" in bad.reason


def test_hostile_responses_are_read_in_no_time():
    reward = answer.number()
    started = time.process_time()
    for text in ("9" * 200_000, "1e999999999", "1," * 100_000, "-" * 200_000, "1/" * 100_000, "\\boxed{" * 50_000):
        assert correct(reward, text) == 0.0
        assert correct(answer.boxed(), text) == 0.0
        assert correct(answer.exact(after="answer:"), text) == 0.0
    assert time.process_time() - started < 5


def test_numbers_are_read_as_fractions():
    assert last_quantity("0.1. Then 0.2") == Quantity(Fraction(1, 5))
    assert quantity("41 apples") == Quantity(Fraction(41), "apple")
    assert quantity("41 or more") is None
    assert quantity("1e999") == Quantity(Fraction(10) ** 999)
    assert boxed("\\boxed{a{b}c}") == "a{b}c"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"pattern": "("}, "options.pattern"),
        ({"pattern_weight": 2.0, "pattern": "a"}, "options.pattern_weight"),
        ({"pattern_weight": 0.5}, "options.pattern"),
        ({"after": ""}, "options.after"),
    ],
)
@pytest.mark.parametrize("name", ["exact", "number", "boxed"])
def test_wrong_options_say_which(name, options, word):
    with pytest.raises(UserError, match=word):
        getattr(answer, name)(**options)


def test_number_refuses_a_tolerance_that_is_none():
    with pytest.raises(UserError, match="tolerance"):
        answer.number(tolerance=-1)


@pytest.mark.parametrize("name", ["answer", "answer:exact", "answer:number", "answer:boxed"])
def test_loads_by_the_names_a_recipe_writes(name):
    loaded = loading.build(loading.find(name), {})
    truth = "\\boxed{41}" if name in ("answer", "answer:exact") else "41"
    assert loaded.declaration.inputs == ("text",)
    assert loaded.call([sample("\\boxed{41}", truth)], context=Context())["score"] == [1.0]
