"""Scoring that overlaps sampling: rewards run while samples come, groups when they are whole, spans of responses."""

import dataclasses
import math
import threading
import time
from pathlib import Path

import pytest
import torch

import mmrl
from mmrl.config.names import located, resolve_options
from mmrl.config.schema import Reward
from mmrl.core.reward_contract import Span, Spans
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards import loading
from mmrl.rewards.scoring import RewardError, RewardSet
from tests.support.scoring import sample

SLEEPER = """
import mmrl, threading, time
seen = []
@mmrl.reward(inputs=("text",))
def slow(samples, *, context, seconds=0.2):
    seen.append((threading.get_ident(), [s.id.sample for s in samples], time.perf_counter()))
    time.sleep(seconds)
    return [float(s.id.sample) for s in samples]
held, done, at_work, most = threading.Event(), [], {}, {}
@mmrl.reward(inputs=("text",))
def waits(samples, *, context):
    seen.append((threading.get_ident(), [s.id.sample for s in samples], time.perf_counter()))
    assert held.wait(60)
    done.append(samples[0].id.sample)
    return [float(s.id.sample) for s in samples]
meeting = threading.Barrier(2, timeout=60)
@mmrl.reward(inputs=("text",))
def meets(samples, *, context):
    label = context.label
    at_work[label] = at_work.get(label, 0) + 1
    most[label] = max(most.get(label, 0), at_work[label])
    if samples[0].id.sample == 0: meeting.wait()
    seen.append((label, [s.id.sample for s in samples], time.perf_counter()))
    at_work[label] -= 1
    return [float(s.id.sample) for s in samples]
@mmrl.reward(inputs=("text",), per="group")
def rank(samples, *, context):
    seen.append(("group", [(s.id.slot, s.id.sample) for s in samples], time.perf_counter()))
    return [float(len(samples))] * len(samples)
@mmrl.reward(inputs=("text",))
def breaks(samples, *, context, at=0):
    if any(s.id.sample == at for s in samples): raise OSError("down")
    return [1.0] * len(samples)
"""
SPANS = """
import mmrl
from mmrl.core.reward_contract import Failed, Spans
@mmrl.reward(inputs=("text",), spans=True)
def steps(samples, *, context, spans=None):
    made = [Spans([(0, 1, -1.0), (1, len(s.text), 0.5)]) for s in samples] if spans is None else eval(spans)
    return {"score": [0.25] * len(samples), "spans": made}
@mmrl.reward(inputs=("text",), spans=True)
def fails(samples, *, context):
    return {"score": [Failed("prose"), 0.5], "spans": [None, Spans()]}
@mmrl.reward(inputs=("text",), spans=True)
def alone(samples, *, context):
    return {"spans": [Spans()] * len(samples)}
@mmrl.reward(inputs=("text",))
def undeclared(samples, *, context):
    return {"score": [0.5] * len(samples), "spans": [Spans()] * len(samples)}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    (tmp_path / "pieces.py").write_text(SPANS)
    return tmp_path


def rewards(root, *names, **config):
    return RewardSet([Reward(name=f"{root}/{name}", **config) for name in names])


def sleeper(root):
    return mmrl.load("rewards", str((root / "sleeper.py").resolve()))


def seen(root):
    found = sleeper(root).seen
    copy = list(found)
    found.clear()
    return copy


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_scoring_begins_with_the_first_micro_batch_and_add_returns_at_once(folder):
    module, scoring = sleeper(folder), rewards(folder, "sleeper.py:waits").start(4)
    for k in range(3):
        scoring.add([sample(0, k)])
        until(lambda: module.seen)  # the first one is scored while the next ones are generated
    assert len(module.seen) == 1
    assert not module.done  # so ``add`` has returned before
    module.held.set()
    assert scoring.finish([[0, 1, 2]]).total.tolist() == [0.0, 1.0, 2.0]
    assert [samples for _, samples, _ in seen(folder)] == [[0], [1], [2]]


def test_what_was_scored_during_generation_is_not_waited_for(folder):
    began, scoring = time.perf_counter(), rewards(folder, "sleeper.py:slow").start(4)
    for k in range(3):
        scoring.add([sample(0, k)])
    until(lambda: all(call.answer.done() for call in scoring._calls))  # "generation"
    scores = scoring.finish([[0, 1, 2]])
    assert scores.total.tolist() == [0.0, 1.0, 2.0]
    assert scores.waited < scores.seconds["slow"]
    assert 0.6 <= scores.seconds["slow"] <= time.perf_counter() - began


def test_rewards_run_beside_one_another_each_in_order(folder):
    both = RewardSet(
        [
            Reward(name=f"{folder}/sleeper.py:meets", label="a", batch_size=1),
            Reward(name=f"{folder}/sleeper.py:meets", label="b", batch_size=2),
        ],
    )
    scores = both.score([sample(0, k) for k in range(4)], [[0, 1, 2, 3]])  # the first call of each has met the other's
    assert scores.parts["a"].tolist() == scores.parts["b"].tolist() == [0, 1, 2, 3]
    calls = seen(folder)
    assert [c for label, c, _ in calls if label == "a"] == [[0], [1], [2], [3]]
    assert [c for label, c, _ in calls if label == "b"] == [[0, 1], [2, 3]]
    assert sleeper(folder).most == {"a": 1, "b": 1}


def test_micro_batches_give_the_scores_of_one_batch(folder):
    samples = [sample(slot, k) for slot in range(3) for k in range(4)]
    groups = [list(range(4 * s, 4 * s + 4)) for s in range(3)]
    config = [
        Reward(name=f"{folder}/sleeper.py:slow", weight=2.0, normalize="group", options={"seconds": 0.0}),
        Reward(name=f"{folder}/sleeper.py:rank", weight=0.5),
    ]
    whole = RewardSet(config).score(samples, groups, step=4)
    scoring = RewardSet(config).start(4, group_size=4)
    for first in range(0, 12, 3):
        scoring.add(samples[first : first + 3])
    pieces = scoring.finish(groups)
    torch.testing.assert_close(pieces.total, whole.total, rtol=0, atol=0)
    assert {k: v.tolist() for k, v in pieces.parts.items()} == {k: v.tolist() for k, v in whole.parts.items()}


def test_a_group_is_scored_when_it_is_whole_and_attempts_are_other_groups(folder):
    scoring = rewards(folder, "sleeper.py:rank").start(4, group_size=2)
    scoring.add([sample(0, 0), sample(1, 0), sample(0, 0, attempt=1)])
    scoring.add([sample(1, 1), sample(0, 1)])
    until(lambda: len(sleeper(folder).seen) == 2)
    assert [group for _, group, _ in seen(folder)] == [[(1, 0), (1, 1)], [(0, 0), (0, 1)]]
    scores = scoring.finish([[0, 4], [1, 3], [2]])
    assert [group for _, group, _ in seen(folder)] == [[(0, 0)]]  # the attempt that stayed short
    assert scores.total.tolist() == [2, 2, 1, 2, 2]


def test_groups_must_be_those_that_were_scored_and_hold_each_sample_once(folder):
    scoring = rewards(folder, "sleeper.py:rank").start(4, group_size=2)
    scoring.add([sample(0, 0), sample(0, 1), sample(1, 0)])
    with pytest.raises(ValueError, match="each of the 3 samples once"):
        scoring.finish([[0, 1]])
    with pytest.raises(ValueError, match="are none in"):
        scoring.finish([[0], [1, 2]])


def test_a_failure_stops_the_run_while_it_still_samples_and_forgets_what_waits(folder):
    both = RewardSet(
        [Reward(name=f"{folder}/sleeper.py:breaks"), Reward(name=f"{folder}/sleeper.py:waits", batch_size=1)]
    )
    scoring = both.start(4)
    scoring.add([sample(0, k) for k in range(5)])
    until(lambda: scoring._calls[0].answer.done() and sleeper(folder).seen)
    with pytest.raises(RewardError, match=r"raised OSError: down at [\s\S]*step 4"):
        scoring.add([sample(1, 9)])
    sleeper(folder).held.set()
    until(lambda: all(call.answer.done() for call in scoring._calls))
    assert [samples for _, samples, _ in seen(folder)] == [[0]]  # the one that had begun
    dropped = rewards(folder, "sleeper.py:breaks", on_failure="drop", batch_size=1).score(
        [sample(0, 0), sample(0, 1)], [[0, 1]]
    )
    assert torch.isnan(dropped.total).tolist() == [True, False]


def test_seconds_are_the_time_a_reward_was_busy_not_the_sum_of_calls_at_once(folder):
    (folder / "many.py").write_text(
        "import asyncio, mmrl\n@mmrl.reward(inputs=('text',))\nasync def score(samples, *, context):\n"
        "    await asyncio.sleep(0.3)\n    return [1.0] * len(samples)\n"
    )
    began = time.perf_counter()
    scores = rewards(folder, "many.py", batch_size=1).score([sample(0, k) for k in range(6)], [list(range(6))])
    wall = time.perf_counter() - began
    assert 0.3 <= scores.seconds["many"] <= wall  # the sum is 1.8, which a busy machine alone may take
    assert 0.1 < scores.waited <= wall


def test_close_ends_every_thread_and_closes_what_the_reward_holds(folder):
    (folder / "held.py").write_text(
        "closed = []\nclass score:\n    def score(self, samples, *, context): return [1.0] * len(samples)\n"
        "    def close(self): closed.append(1)\n"
    )
    before = set(threading.enumerate())
    both = RewardSet(
        [Reward(name=f"{folder}/held.py"), Reward(name=f"{folder}/sleeper.py:slow", options={"seconds": 0.0})]
    )
    made = [Sample(Prompt("p", "p"), SampleId(0, 0, 0, 0), image=object(), text="a")]
    assert both.score(made, [[0]]).total.tolist() == [1.0]
    both.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()
    assert mmrl.load("rewards", str((folder / "held.py").resolve())).closed == [1]
    assert both.score(made, [[0]]).total.tolist() == [1.0]  # and can be used again
    both.close()


def test_spans_come_back_per_label_as_they_were_returned(folder):
    scores = rewards(folder, "pieces.py:steps", weight=3.0).score([sample(0, 0, text="abcd")], [[0]])
    assert scores.spans == {"steps": [[Span(0, 1, -1.0), Span(1, 4, 0.5)]]}
    assert scores.total.tolist() == [0.75]
    assert set(scores.parts) == {"steps"}
    plain = rewards(folder, "sleeper.py:slow", options={"seconds": 0.0})
    assert plain.spans == []
    assert plain.score([sample(0, 0)], [[0]]).spans == {}


def test_a_sample_whose_spans_failed_is_dropped(folder):
    made = [sample(0, 0), sample(0, 1)]
    scores = rewards(folder, "pieces.py:fails", on_failure="drop").score(made, [[0, 1]])
    assert scores.spans == {"fails": [None, []]}
    assert math.isnan(scores.total[0])
    assert scores.total[1] == 0.5
    assert scores.failures[0].reason == "prose"


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("steps", {"spans": "[Spans([(0, 9, 1.0)])]"}, r"returned the span \(0, 9, 1.0\) of a text of 3 characters"),
        ("steps", {"spans": "[None]"}, "returned no spans"),
        ("steps", {"spans": "[[(0, 1, 1.0)]]"}, "returned a list as spans"),
        ("steps", {"spans": "[]"}, "returned no list of 1 spans"),
        ("steps", {"spans": "[Spans([(2, 1, 1.0)])]"}, "is no piece of a text"),
        ("steps", {"spans": "[Spans([(0, 1, float('nan'))])]"}, "is no piece of a text"),
        ("alone", {}, "returned spans alone"),
        ("undeclared", {}, r"did not declare[\s\S]*spans=True"),
    ],
)
def test_bad_spans_are_a_failure_of_the_sample(folder, name, options, reason):
    one = [sample(0, 0)]
    with pytest.raises(RewardError, match=reason):
        rewards(folder, f"pieces.py:{name}", options=options).score(one, [[0]])
    dropped = rewards(folder, f"pieces.py:{name}", options=options, on_failure="drop").score(one, [[0]])
    assert torch.isnan(dropped.total).all()


def test_context_says_where_the_run_writes_and_what_the_reward_is_called(folder):
    (folder / "where.py").write_text(
        "def score(samples, *, context):\n"
        "    assert (str(context.folder), context.label, context.step) == ('/runs/x', 'w', 5)\n    return [1.0]\n"
    )
    set_ = RewardSet([Reward(name=f"{folder}/where.py", label="w")], folder=Path("/runs/x"))
    made = [Sample(Prompt("p", "p"), SampleId(0, 0, 0, 0), image=object())]
    assert set_.score(made, [[0]], step=5).total.tolist() == [1.0]


def test_a_reward_with_deadlines_of_its_own_is_not_cut(folder):
    (folder / "own.py").write_text(
        "import time, mmrl\n@mmrl.reward(inputs=('text',), own_deadline=True)\n"
        "def score(samples, *, context):\n    time.sleep(0.4)\n    return [1.0]\n"
    )
    assert rewards(folder, "own.py", timeout=0.1).score([sample(0, 0)], [[0]]).total.tolist() == [1.0]


def test_options_that_name_files_are_looked_up_from_the_recipes_folder(tmp_path):
    (tmp_path / "rubric.txt").write_text("?")
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text("{}")
    (tmp_path / "says.py").write_text(
        "import mmrl\n@mmrl.reward(inputs=('text',), paths=('rubric', 'model.vllm', 'model'))\n"
        "def score(samples, *, context, rubric, model, votes):\n"
        "    return {'score': [1.0], 'right': [float([rubric, model, votes] == eval(samples[0].prompt.text))]}\n"
    )
    options = {"rubric": "rubric.txt", "model": {"vllm": "judge", "x": 1}, "votes": 3}
    expected = [str(tmp_path / "rubric.txt"), {"vllm": str(tmp_path / "judge"), "x": 1}, 3]
    asked = dataclasses.replace(sample(0, 0), prompt=Prompt("p", repr(expected)))
    (found,) = located(tmp_path, {"rewards": [{"name": "says.py", "options": options}]})["rewards"]
    said = RewardSet([Reward.model_validate(found)]).score([asked], [[0]])
    assert said.parts["says/right"].tolist() == [1.0]
    template = "Is it {{ response }}?\nyes or no"
    assert resolve_options(tmp_path, {"rubric": template, "model": ""}, ["rubric", "model"]) == {
        "rubric": template,
        "model": "",
    }


def test_spans_hold_plain_numbers():
    assert Spans([(0, 2, 1), (2, 2, -1)]).spans == (Span(0, 2, 1.0), Span(2, 2, -1.0))
    with pytest.raises(ValueError, match="no piece"):
        Spans([(-1, 2, 0.0)])


RUDE = """
import threading, mmrl
from mmrl.core.reward_contract import Failed

@mmrl.reward(inputs=('text',))
def fails(samples, *, context):
    return [Failed('\\x1b]0;title\\x07\\x1b[2Jred' + 'x' * 100_000) for _ in samples]

@mmrl.reward(inputs=('text',))
def raises(samples, *, context):
    raise ValueError('\\x1b[31mred\\x1b[0m\\r\\x9b2J\\u202ewon' + 'x' * 100_000)

@mmrl.reward(inputs=('text',))
class hangs:
    def score(self, samples, *, context):
        return [1.0 for _ in samples]
    def close(self):
        threading.Event().wait()
"""


def test_what_a_reward_says_of_a_failure_is_bounded_and_moves_no_cursor(folder):
    (folder / "rude.py").write_text(RUDE)
    for name, start in (("fails", "red"), ("raises", "raised ValueError: red")):
        (failure,) = rewards(folder, f"rude.py:{name}", on_failure="drop").score([sample(0, 0)], [[0]]).failures
        assert failure.reason.startswith(start)
        assert failure.reason.isprintable()
        assert len(failure.reason) < 2500
        with pytest.raises(RewardError) as found:
            rewards(folder, f"rude.py:{name}", on_failure="fail").score([sample(0, 0)], [[0]])
        assert str(found.value).replace("\n", "").isprintable()
        assert len(str(found.value)) < 3000


def test_a_close_that_hangs_is_given_up_and_named(folder, monkeypatch, capsys):
    (folder / "rude.py").write_text(RUDE)
    monkeypatch.setattr(loading, "CLOSE_S", 0.2)
    set_ = rewards(folder, "rude.py:hangs")
    assert set_.score([sample(0, 0)], [[0]]).total.tolist() == [1.0]
    set_.close()
    said = capsys.readouterr().err
    assert "warning: close() of the reward rude.py:hangs" in said
    assert "given up after 0.2 s" in said
