"""The verifiers of answers on the table of labelled cases, and on numbers written in many ways. math-verify apart."""

from __future__ import annotations

import importlib
import random
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from mmrl.rewards.answers import boxed, comparable, same, stated
from mmrl.rewards.numerals import last_quantity

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def benchmark():
    """The benchmark, imported as its command imports it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("answers")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_the_table_is_whole(benchmark):
    table = benchmark.cases()
    assert len(table) >= 150
    assert len({(case["truth"], case["response"]) for case in table}) == len(table)
    assert all(set(case) == {"kind", "truth", "response", "right"} for case in table)
    for kind in {case["kind"] for case in table}:
        assert any(not case["right"] for case in table if case["kind"] == kind), kind


@pytest.mark.parametrize(("name", "refused"), [("number", 19), ("boxed", 95)])
def test_no_wrong_answer_of_the_table_is_paid(benchmark, name, refused):
    counts = Counter(benchmark.verdicts(name, benchmark.cases()))
    assert counts["falsely paid"] == 0
    assert counts["falsely refused"] <= refused
    assert counts["not judged"] == 0 or name == "number"


def test_the_command_prints_the_rates(benchmark, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(benchmark, "NAMES", ("number", "boxed"))
    assert benchmark.main(["--wrong", "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    assert "answer:number" in printed
    assert "falsely paid   0 ( 0.0%)" in printed
    assert "boxed: falsely refused: algebra" in printed
    assert (tmp_path / "found.json").exists()


def written(value: Fraction, draw: random.Random) -> str:
    """``value`` in one of the ways of writing it."""
    sign, size = "-" if value < 0 else "", abs(value)
    whole, part = divmod(size, 1)
    ways = [f"{sign}\\frac{{{size.numerator}}}{{{size.denominator}}}", f"{sign}{size.numerator}/{size.denominator}"]
    if whole and part:
        ways += [f"{sign}{whole}\\frac{{{part.numerator}}}{{{part.denominator}}}"]
        ways += [f"{sign}{whole} {part.numerator}/{part.denominator}"]
    if size.denominator == 1:
        ways += [f"{sign}{whole}", f"{sign}{int(whole):,}", f"{sign}{int(whole):,}".replace(",", "{,}")]
    if Fraction(f"{float(size):.4f}") == size:
        ways += [
            f"{sign}{float(size):.4f}",
            f"{sign}{float(size * 100):.2f}\\%",
            f"{sign}{float(size):.4f} \\text{{ cm}}",
        ]
    return draw.choice(ways)


def test_two_ways_of_writing_a_number_are_the_same_and_two_numbers_are_not():
    draw = random.Random(0)
    values = [Fraction(draw.randint(-12, 12), draw.choice([1, 2, 3, 4, 5, 7, 8])) for _ in range(40)] + [
        Fraction(12345)
    ]
    for _ in range(600):
        a, b = draw.choice(values), draw.choice(values)
        one, other = written(a, draw), written(b, draw)
        assert same(one, other) == (a == b), (one, other)
        found = last_quantity(f"So the answer is \\boxed{{{one}}}.")
        assert found is not None
        assert found.value == a, one


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("\\boxed{1} or \\boxed{2}", "1, 2"),
        ("\\boxed{1}, then \\boxed{2}", "2"),
        ("\\boxed{3} \\boxed{3}", "3"),
        ("\\boxed{\\boxed{3}}", "3"),
        ("\\boxed{\\{1\\}}", "\\{1\\}"),
        ("\\boxed{5 + \\boxed{3}}", "5 + \\boxed{3}"),
        ("\\boxed{1} and \\boxed{2", None),
        ("1", None),
    ],
)
def test_boxes(text, held):
    assert boxed(text) == held


def test_where_an_answer_is_stated():
    assert stated("First 3.\nThe final answer is: $\\frac{1}{2}$.") == "$\\frac{1}{2}$"
    assert stated("The answer is 3, or \\boxed{4}") == "4"
    assert stated("x^2") == "x^2"


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ("1 2", "3"),
        ("1010_2", "1010"),
        ("9", "9\\%"),
        ("f(x)", "f'(x)"),
        ("x^2=4", "4"),
        ("(1,2)", "\\{1,2\\}"),
        ("X", "x"),
        ("1,2,\\ldots,10", "1,2,10"),
        ("1e3", "3e"),
        ("x" * 1000, "x"),
    ],
)
def test_what_a_parser_of_latex_would_misread_is_not_asked(found, wanted):
    assert comparable(found, wanted) is None
    assert not same(found, wanted)
