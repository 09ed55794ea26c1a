"""answer:math calls two exact numbers equal exactly where they are, in whatever notation: no rounding of any kind."""

import math
import random
from fractions import Fraction

import pytest

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId

answer = mmrl.load("rewards", "answer")
TINY = [Fraction(1, 10**60), Fraction(1, 10**200), Fraction(1, math.factorial(90)), Fraction(1, 2**170)]


@pytest.fixture(scope="module")
def reward():
    pytest.importorskip("math_verify")
    reward = answer.math(deadline=20)
    yield reward
    reward.close()


def correct(reward, pairs):
    asked = [
        Sample(Prompt(f"p/{i}", "?", {"answer": truth}), SampleId(0, 0, 0, i), text=f"\\boxed{{{text}}}")
        for i, (text, truth) in enumerate(pairs)
    ]
    return [value == 1.0 for value in reward.score(asked, context=Context())["correct"]]


def decimal(value):
    """Digits of a value that has finitely many; empty for others."""
    for places in range(1, 230):
        if (value * 10**places).denominator == 1:
            digits = f"{abs(int(value * 10**places)):0{places + 1}d}"
            return ("-" if value < 0 else "") + digits[:-places] + "." + digits[-places:]
    return ""


def written(value, draw):
    """``value`` in one of the notations that say it exactly."""
    sign, size = "-" if value < 0 else "", abs(value)
    top, below = size.numerator, size.denominator
    ways = [f"{sign}\\frac{{{top}}}{{{below}}}", f"{sign}{top}/{below}", f"{sign}\\dfrac{{{2 * top}}}{{{2 * below}}}"]
    ways += [f"{sign}{top} \\cdot \\frac{{1}}{{{below}}}", f"\\sqrt{{{top**2}}} \\cdot \\frac{{{sign}1}}{{{below}}}"]
    ways += [f"1+\\frac{{{(value - 1).numerator}}}{{{below}}}", f"({sign}{top}) \\div {below}"]
    if below == 1:
        ways += [
            f"{sign}{top}",
            f"{sign}{top:,}",
            f"{sign}{top:,}".replace(",", "{,}"),
            f"{sign}{top:,}".replace(",", "\\,"),
        ]
        ways += [f"{sign}{top}.0", f"{sign}{top}.", f"{sign}{top:,}".replace(",", ",\\! ")]
    if text := decimal(value):
        ways += [text, text + "0"] + ([decimal(value * 100) + "\\%"] if decimal(value * 100) else [])
    for power in (10, 2):
        found = math.log(below, power)
        if below > 1 and power ** round(found) == below:
            ways += [
                f"{sign}{top} \\times {power}^{{-{round(found)}}}",
                f"\\frac{{{sign}{top}}}{{{power}^{{{round(found)}}}}}",
            ]
    for n in range(3, 100):
        if math.factorial(n) == below:
            ways += [f"\\frac{{{sign}{top}}}{{{n}!}}", f"\\frac{{{sign}{n + 1}}}{{({n + 1})!}} \\cdot {top}"]
        if math.factorial(n) == top:
            ways += [f"\\frac{{{sign}{n}!}}{{{below}}}"]
    return draw.choice([way for way in ways if len(way) < 380] or [ways[0]])


def values(draw):
    """A value and another: the same, or one that differs from it by next to nothing."""
    kind = draw.randrange(6)
    value = {
        0: lambda: Fraction(draw.randint(-60, 60), draw.choice([1, 2, 3, 7, 8, 12, 25])),
        1: lambda: Fraction(draw.randint(-5, 5) or 1, math.factorial(draw.randint(3, 95))),
        2: lambda: Fraction(draw.choice([1, 3, -7]), 2 ** draw.randint(20, 180)),
        3: lambda: Fraction(draw.randint(10**40, 10**60)),
        4: lambda: Fraction(math.factorial(draw.randint(20, 70))),
        5: lambda: Fraction(draw.randint(1, 10**70), 10 ** draw.choice([30, 55, 80])),
    }[kind]()
    near = [value, value, value + draw.choice(TINY), value - draw.choice(TINY), value + 1, value * 2, -value]
    if kind in (1, 2):
        near += [value / 2, value / 4, value / (2005 * 2006)]
    return value, draw.choice(near)


@pytest.mark.slow
@pytest.mark.sweep("pairs of exact numbers in two notations")
def test_two_numbers_are_equal_exactly_where_they_are(reward, sweep):
    draw = random.Random(0)
    drawn = [values(draw) for _ in range(sweep.size(250, 6_000))]
    pairs = [(written(a, draw), written(b, draw)) for a, b in drawn]
    for (a, b), pair, said in zip(drawn, pairs, correct(reward, pairs), strict=True):
        sweep.check(said == (a == b), (*pair, "paid" if said else "refused"))
    sweep.done()


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("\\frac{1}{2004!}", "\\frac{1}{2006!}", False),
        ("\\frac{2005 \\cdot 2006}{2006!}", "\\frac{1}{2004!}", True),
        ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}", False),
        ("\\frac{2}{2^{99}}", "\\frac{1}{2^{98}}", True),
        ("2^{1000}+1", "2^{1000}", False),
        ("4^{500}", "2^{1000}", True),
        ("\\sqrt2+10^{-300}", "\\sqrt2", False),
        ("\\sqrt2 \\cdot \\sqrt3", "\\sqrt6", True),
        ("\\pi + 10^{-70}", "\\pi", False),
        ("e^{-200}", "e^{-201}", False),
        ("e^{-200}", "0", False),
        ("2^{-300}x", "2^{-301}x", False),
        ("x+10^{-60}", "x", False),
        ("(1, 10^{-60})", "(1, 2 \\cdot 10^{-60})", False),
        ("\\{10^{-60}, 1\\}", "\\{10^{-61}, 1\\}", False),
        ("[0, 10^{-70}]", "[0, 10^{-71}]", False),
        ("x = 10^{-70}", "x = 10^{-71}", False),
        ("x < 10^{-70}", "x < 10^{-71}", False),
        ("\\begin{pmatrix}10^{-60}\\\\1\\end{pmatrix}", "\\begin{pmatrix}10^{-61}\\\\1\\end{pmatrix}", False),
        ("\\sqrt{5+2\\sqrt6}", "\\sqrt2+\\sqrt3", True),
        ("\\sqrt{5+2\\sqrt6}", "\\sqrt2+\\sqrt3+10^{-80}", False),
        ("\\log_2 8", "3", True),
        ("\\sum_{k=1}^{10} k", "55", True),
        ("2^{100000}", "4^{50000}", True),
        ("2^{100000}+1", "4^{50000}", False),
        ("1-10^{-5000}", "1", False),
        ("0.\\overline{9}", "1", True),
        ("\\binom{100}{50}", "\\frac{100!}{50! \\cdot 50!}", True),
        ("\\binom{100}{50}+1", "\\frac{100!}{50! \\cdot 50!}", False),
        ("0.33333333333333333333333333333333333333333333333333333333333333333", "\\frac13", False),
        ("\\sin(\\pi/6)", "0.5", True),
        ("\\cos\\frac{\\pi}{12}", "\\frac{\\sqrt6+\\sqrt2}{4}", True),
        ("10^{-70}i", "10^{-71}i", False),
    ],
)
def test_no_difference_is_too_small(reward, text, truth, right):
    assert correct(reward, [(text, truth), (truth, text)]) == [right, right]
