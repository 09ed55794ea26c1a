"""answer:math reads what math-verify's own tests read: connectors, relations, intervals, chains; and pays no more."""

import random

import pytest

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.answers import boxed, stated

answer = mmrl.load("rewards", "answer")


@pytest.fixture(scope="module")
def reward():
    pytest.importorskip("math_verify")
    reward = answer.math(deadline=10)
    yield reward
    reward.close()


def correct(reward, text, truth):
    sample = Sample(Prompt("p/1", "?", {"answer": truth}), SampleId(0, 0, 0, 0), text=text)
    return reward.score([sample], context=Context())["correct"][0] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("\\boxed{11,\\! 111,\\! 111,\\! 100}", "11111111100"),
        ("\\boxed{2} \\quad \\text{and} \\quad \\boxed{3}", "2,3"),
        ("$\\boxed{2}$, $\\boxed{3}$ and $\\boxed{5}$", "\\{5,3,2\\}"),
        ("\\(\\boxed{2}\\) or \\(\\boxed{3}\\)", "3, 2"),
        ("\\boxed{12} cats and \\boxed{7}", "12, 7"),
        ("\\boxed{(-793,10)}", "-793 < a < 10"),
        ("\\boxed{(-793,10)}", "$-793 < a < 10$"),
        ("\\boxed{-793 < a < 10}", "(-793,10)"),
        ("$x \\in [-2,7]$", "-2 \\le x \\le 7"),
        ("\\boxed{[-2,7)}", "-2 \\leq x < 7"),
        ("\\boxed{x \\geq 5}", "x >= 5"),
        ("\\boxed{x \\lt 5}", "x < 5"),
        ("\\boxed{x != 5}", "x \\neq 5"),
        ("\\boxed{1>x>0}", "0<x<1"),
        ("\\boxed{(5, \\infty)}", "x \\gt 5"),
        ("\\boxed{125\\textnormal{ miles}}", "125"),
        ("The final answer is $(1,2)$. I hope it is correct.", "(1,2)"),
        ("Earlier \\boxed{3}. Final Answer: The final answer is $4$. I hope it is correct.", "4"),
        ("Therefore $x \\geq 5$ is the solution.", "$x >= 5$"),
        ("It is $ \\begin{pmatrix}1 & 0 \\\\ 0 & 1\\end{pmatrix} $.", "\\begin{bmatrix}1 & 0 \\\\ 0 & 1\\end{bmatrix}"),
        ("$\\boxed{28}$ percent", "28\\%"),
        ("\\boxed{28 pct}", "28%"),
        ("$x = 4+4+3 = 11$", "$x = 11$"),
        ("\\boxed{\\frac{1}{\\sqrt{6}}}", "\\frac{AB}{CD} = \\frac{\\sqrt{6}}{6}"),
        ("\\boxed{7:32}", "S_{ABC}:S = 7:32"),
        ("\\boxed{2(x+1)} \\text{ and } \\boxed{(x-1)^2}", "a_1 = x^2-2x+1, a_2 = 2x+2"),
        ("\\boxed{(\\sqrt{8}, 1), (2, 3)}", "(2,3),(2\\sqrt2,1)"),
        ("\\boxed{-2, -1}", "\\{-1,-2\\}"),
        ("\\boxed{\\frac{3}{4}}", "\\\\frac{3}{4}"),
        ("\\boxed{\\left(\\frac{1}{5},2\\right)}", "\\\\left(\\\\frac{1}{5},2\\\\right)"),
        ("\\boxed{3,75}", "3.75"),
        ("\\boxed{0,111}", "0.111"),
        ("it covers 1,000.99m²", "1000.99"),
    ],
)
def test_what_is_right_is_paid(reward, text, truth):
    assert correct(reward, text, truth)


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("$21, 36, and 82$", "$19, 46, and 82$"),
        ("\\boxed{82}", "19, 46, and 82"),
        ("$3$ or $4$", "4"),
        ("The value is not $3$", "3"),
        ("It is never $x+1$", "1+x"),
        ("It is $3$, or rather 5", "3"),
        ("\\boxed{1} \\quad \\text{and} \\quad \\boxed{2}", "2"),
        ("\\boxed{1} is wrong and \\boxed{2}", "1,2"),
        ("\\boxed{[-793,10]}", "-793 < a < 10"),
        ("\\boxed{(-793,10)}", "-793 < a \\le 10"),
        ("\\boxed{(1,2)}", "\\{1,2\\}"),
        ("\\boxed{1 \\text{ and } 2}", "(1,2)"),
        ("\\boxed{1,2}", "(1,2)"),
        ("\\boxed{(2,1)}", "(1,2)"),
        ("\\boxed{x > 5}", "x \\ge 5"),
        ("\\boxed{0<y<1}", "0<x<1"),
        ("\\boxed{x < 5}", "x > 5"),
        ("\\boxed{2.3}", "2,3"),
        ("\\boxed{1,234}", "1.234"),
        ("\\boxed{0,111}", "111"),
        ("\\boxed{28}", "28\\%"),
        ("$x = 11 = 7$", "$x = 11$"),
        ("\\boxed{x=5 or x=6}", "x=6"),
        ("\\boxed{x = 1 = 3}", "3"),
        ("\\boxed{7:33}", "S_{ABC}:S = 7:32"),
        ("\\boxed{2(x+1)} and \\boxed{(x-1)^2}", "x^2-2x+1, 2x+3"),
        ("\\boxed{x, x}", "x, y"),
        ("\\boxed{\\frac{3}{5}}", "\\\\frac{3}{4}"),
        ("The final answer is $3$. I hope it is correct. \\boxed{4}", "3"),
        ("\\boxed{1 - \\frac1e}", "1 + \\frac1e"),
        ("\\boxed{f(y)}", "f(x)"),
        ("\\boxed{0.33}", "\\frac13"),
    ],
)
def test_what_is_wrong_is_not(reward, text, truth):
    assert not correct(reward, text, truth)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("So $x=2$ or $x=3$.", "x=2, x=3"),
        ("We get \\(a\\), and then \\[b+1\\]", "b+1"),
        ("costs \\$5 and \\$7", "costs \\$5 and \\$7"),
        ("$28$ percent", "28\\%"),
    ],
)
def test_where_a_formula_is_the_answer(text, held):
    assert stated(text) == held


def test_boxes_joined_by_words():
    assert boxed("\\boxed{1} \\text{ for part (a) and } \\boxed{2}") == "1, 2"
    assert boxed("$\\boxed{3}$ pct") == "3\\%"
    assert boxed("\\boxed{1} is not it, so \\boxed{2}") == "2"


NUMBERS = ["-3", "0", "2", "\\frac{1}{2}", "7", "\\sqrt{2}", "x+1", "12"]
ALSO = {"\\frac{1}{2}": "0.5", "\\sqrt{2}": "\\frac{2}{\\sqrt{2}}", "x+1": "1+x", "12": "12.0"}


def listed(kind, entries, draw):
    """A response with a list, a set or a tuple of these entries."""
    entries = [ALSO.get(entry, entry) if draw.random() < 0.5 else entry for entry in entries]
    if kind == "tuple":
        return draw.choice(["\\boxed{(%s)}", "The answer is $(%s)$.", "So $\\left(%s\\right)$ it is."]) % ", ".join(
            entries
        )
    joins = [", ", ",\\ ", " \\text{ and } ", ";", " \\text{ or } "]
    held = draw.choice(joins).join(entries)
    boxes = draw.choice([" and ", ", ", " \\quad \\text{and} \\quad ", "$ and $", "\\) or \\("]).join(
        f"\\boxed{{{entry}}}" for entry in entries
    )
    return draw.choice([f"\\boxed{{{held}}}", f"\\boxed{{\\{{{held}\\}}}}", boxes, f"We get ${held}$"])


@pytest.mark.slow
@pytest.mark.sweep("lists, sets and tuples in two notations")
def test_lists_are_equal_exactly_where_they_are(reward, sweep):
    draw = random.Random(0)
    for _ in range(sweep.size(100, 3_000)):
        kind = draw.choice(["list", "tuple"])
        wanted = draw.sample(NUMBERS, draw.randint(2, 4))
        said = draw.choice([wanted, draw.sample(wanted, len(wanted)), wanted[1:], [*wanted[:-1], "5"], [*wanted, "9"]])
        truth = (
            "(" + ", ".join(wanted) + ")" if kind == "tuple" else draw.choice(["%s", "\\{%s\\}"]) % ", ".join(wanted)
        )
        if kind == "tuple" and len(said) == 1:
            continue
        right = said == wanted if kind == "tuple" else sorted(said) == sorted(wanted)
        text = listed(kind, said, draw)
        sweep.check(correct(reward, text, truth) == right, (text, truth, "refused" if right else "paid"))
    sweep.done()


def of_interval(low, high, closed, draw):
    """The numbers between two, as an interval or as an inequality."""
    signs = ["\\le" if end else "<" for end in closed]
    turned = ["\\ge" if end else ">" for end in closed]
    interval = ("[" if closed[0] else "(") + f"{low}, {high}" + ("]" if closed[1] else ")")
    return draw.choice(
        [
            interval,
            f"x \\in {interval}",
            f"{low} {signs[0]} x {signs[1]} {high}",
            f"{high} {turned[1]} x {turned[0]} {low}",
            f"{low} {signs[0]}q x {signs[1]} {high}".replace("<q", "<"),
        ]
    )


@pytest.mark.slow
@pytest.mark.sweep("intervals and inequalities")
def test_intervals_and_inequalities_are_equal_exactly_where_they_are(reward, sweep):
    draw = random.Random(1)
    ends = ["-5", "-\\frac{1}{2}", "0", "1", "\\sqrt{2}", "10"]
    for _ in range(sweep.size(80, 2_000)):
        pairs = [sorted(draw.sample(range(len(ends)), 2)) for _ in range(2)]
        if draw.random() < 0.6:
            pairs[1] = pairs[0]
        closed = [(draw.random() < 0.5, draw.random() < 0.5) for _ in range(2)]
        if draw.random() < 0.6:
            closed[1] = closed[0]
        one, other = (of_interval(*(ends[i] for i in p), c, draw) for p, c in zip(pairs, closed, strict=True))
        right = pairs[0] == pairs[1] and closed[0] == closed[1]
        sweep.check(correct(reward, f"\\boxed{{{one}}}", other) == right, (one, other, "refused" if right else "paid"))
    sweep.done()
