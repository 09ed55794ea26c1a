"""The order in which candidates are shown, with judges behind an endpoint that prefer a place."""

import asyncio
import json
import math
import re

import pytest

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.judging.modes import Mode
from mmrl.rewards.judging.rubric import Rubric
from tests.support import judging

BIAS = 0.2
"""By how much more likely the first candidate is preferred."""
PAIR = "{{ a.response }} over {{ b.response }}"
LIST = "{% for c in candidates %}{{ c.response }} {% endfor %}"


def qualities(body):
    return [int(n) for n in re.findall(r"\d+", body["messages"][-1]["content"])]


def prefers_the_first(handler, body):
    """P(A) is 0.5 + 0.1 times the difference of the qualities, plus the bias."""
    if body is None:
        return False
    a, b = qualities(body)
    p = 0.5 + 0.1 * (a - b) + BIAS
    top = [{"token": "A", "logprob": math.log(p)}, {"token": "B", "logprob": math.log(1 - p)}]
    choice = {"message": {"content": "A"}, "finish_reason": "stop", "logprobs": {"content": [{"top_logprobs": top}]}}
    handler.say(200, json.dumps({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}))
    return True


def ranks_as_shown(handler, body):
    if body is None:
        return False
    said = json.dumps({"ranking": list(range(1, len(qualities(body)) + 1))})
    handler.say(200, json.dumps({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}))
    return True


def asked(before, rubric, texts, prompt="p", **options):
    """The scores of a group, and how many questions the endpoint was asked."""
    with judging.Served(before=before) as server:
        model = {"url": server.url, "name": "tiny"}
        judge = mmrl.load("rewards", "judge:score")(model=model, rubric=rubric, **options)
        group = [Sample(Prompt(prompt, "what"), SampleId(3, 1, 0, k), text=t) for k, t in enumerate(texts)]
        return asyncio.run(judge.score(group, context=Context()))["score"], len(server.requests)


def test_a_judge_that_prefers_the_first_is_unbiased_under_average():
    texts, mine = ["1", "2", "2 too"], lambda i, j: 0.5 + 0.1 * (i - j)
    fair = [(mine(1, 2) + mine(1, 2)) / 2, (mine(2, 1) + mine(2, 2)) / 2, (mine(2, 1) + mine(2, 2)) / 2]
    scores, calls = asked(prefers_the_first, PAIR, texts, mode="pairwise", order="average")
    assert scores == pytest.approx(fair)
    assert calls == 6
    assert asked(prefers_the_first, PAIR, texts, mode="pairwise") == (scores, 6)  # the default


def test_a_fixed_order_is_the_groups_and_asks_half():
    scores, calls = asked(prefers_the_first, PAIR, ["2", "2 too", "2 as well"], mode="pairwise", order="fixed")
    assert scores == pytest.approx([0.5 + BIAS, 0.5, 0.5 - BIAS])  # what is first wins twice, the last loses twice
    assert calls == 3


def test_a_drawn_order_asks_half_is_drawn_alike_again_and_both_ways():
    options = {"mode": "pairwise", "order": "random"}
    one = asked(prefers_the_first, PAIR, ["2", "3", "4"], **options)
    assert one[1] == 3
    assert asked(prefers_the_first, PAIR, ["2", "3", "4"], **options) == one
    rubric, ways = Rubric(PAIR, "pairwise"), []
    for n in range(200):
        group = [Sample(Prompt(f"p{n}", "what"), SampleId(0, n, 0, k), text=t) for k, t in enumerate("ab")]
        ((pair),) = (job.rows for job in Mode.of("pairwise", 1, None, None, 0, "random").jobs(group, rubric, None))
        ways.append(pair == (0, 1))
    assert abs(sum(ways) - 100) < 4 * math.sqrt(200 / 4)


def test_opponents_in_a_fixed_order_are_the_pairs_of_the_ring_once():
    group = [Sample(Prompt("p", "what"), SampleId(0, 0, 0, k), text=t) for k, t in enumerate("abcd")]
    mode, rubric = Mode.of("pairwise", 1, None, 1, 0, "fixed"), Rubric(PAIR, "pairwise")
    assert [job.rows for job in mode.jobs(group, rubric, None)] == [(0, 1), (0, 3), (1, 2), (2, 3)]


def test_rankings_by_place_alone():
    """A judge that ranks as it is shown: nothing but a preference for the first place."""
    texts = ["1", "2", "3"]
    assert asked(ranks_as_shown, LIST, texts, mode="ranking", order="fixed") == ([1.0, 0.5, 0.0], 1)
    assert asked(ranks_as_shown, LIST, texts, mode="ranking", order="average") == ([0.5, 0.5, 0.5], 2)
    drawn, calls = asked(ranks_as_shown, LIST, texts, mode="ranking", order="random")
    assert (sorted(drawn), calls) == ([0.0, 0.5, 1.0], 1)
    assert asked(ranks_as_shown, LIST, texts, mode="ranking") == (drawn, 1)  # the default
    votes = asked(ranks_as_shown, LIST, texts, mode="ranking", order="average", votes=2)
    assert votes == ([0.5, 0.5, 0.5], 4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"order": "average"}, r"options\.order: is for modes pairwise and ranking"),
        ({"mode": "pairwise", "order": "both"}, r"options\.order: 'both'; write average, fixed, random"),
        ({"mode": "ranking", "order": "fixed", "votes": 2}, "at temperature 0 all critiques are the same"),
    ],
)
def test_an_order_that_means_nothing_is_refused(options, reason):
    rubric = {"pairwise": PAIR, "ranking": LIST}.get(options.get("mode"), "{{ response }}")
    with judging.Served() as server:
        model = {"url": server.url, "name": "tiny"}
        with pytest.raises(UserError, match=reason):
            mmrl.load("rewards", "judge:score")(model=model, rubric=rubric, **options)
